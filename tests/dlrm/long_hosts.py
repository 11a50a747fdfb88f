"""What takes too long for the tests: lost and slow hosts, with torch's own limits.

    python -m tests.dlrm.long_hosts lost-meeting | long-cut | slow

The last line of standard output is a JSON object with the seconds of each part.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.dlrm import epochs
from tests.dlrm.cluster import Cluster, ended
from tests.hosts import Hosts

STALL_S = 5
LONG_CUT_S = 90.0
AGENT_S = 240.0


def lost_meeting(hosts: Hosts, folder: Path) -> dict[str, object]:
    """The host of --rdzv-endpoint loses its power. Does the other agent end?"""
    cluster = Cluster(hosts, folder, "--stall-after", STALL_S)
    cluster.agent(0, 2)
    other = cluster.agent(1, 2, "hold@17")
    other.until((folder / "log" / "held").exists)
    began = time.monotonic()
    hosts.lose(0)
    (folder / "log" / "go").touch()
    other.until(lambda: "error: " in other.said)
    rank_s = time.monotonic() - began
    while not other.is_over and time.monotonic() < began + AGENT_S:
        time.sleep(0.1)
    return {
        "rank_s": rank_s,
        "agent_ended": other.is_over,
        "waited_s": time.monotonic() - began,
    }


def long_cut(hosts: Hosts, folder: Path) -> dict[str, object]:
    """The network is cut for longer than torchrun waits. Both agents end, and the command on both hosts goes on."""
    cluster = Cluster(hosts, folder, "--stall-after", STALL_S)
    agents = [cluster.agent(0, 2), cluster.agent(1, 2, "hold@17")]
    agents[1].until((folder / "log" / "held").exists)
    hosts.cut(1)
    (folder / "log" / "go").touch()
    time.sleep(LONG_CUT_S)
    over = [agent.is_over for agent in agents]
    hosts.connect(1)
    began = time.monotonic()
    codes = [agent.wait() for agent in agents]
    ended_s = time.monotonic() - began
    if any(codes):
        ended([cluster.agent(host, 2, name=f"again{host}") for host in range(2)])
    return {"over_in_the_cut": over, "codes": codes, "ended_s": ended_s}


def slow(hosts: Hosts, folder: Path) -> dict[str, object]:
    """The second host has 0.3 of a core, or its link 2 Mbit/s. At which pace does the run go on?"""
    found: dict[str, object] = {}
    hosts.limit_cores(1, 2)
    for name in ("free", "core", "link"):
        (folder / name).mkdir()
        epochs.write(folder / name)
        cluster = Cluster(hosts, folder / name, "--epochs", 6, "--log-every", 20)
        agents = [cluster.agent(host, 2) for host in range(2)]
        latest = folder / name / "run" / "checkpoints" / "LATEST"
        agents[0].until(latest.exists)
        if name == "core":
            hosts.limit_cores(1, 0.3)
        if name == "link":
            hosts.limit_link(1, "2mbit")
        ended(agents)
        hosts.limit_cores(1, 2)
        (end,) = epochs.events(folder / name / "run", "end")
        found[f"{name}_samples_per_s"] = end["samples_per_s"]
        lines = epochs.trained(folder / name / "run")
        found[f"{name}_slow"] = [line.get("slow") for line in lines]
    return found


CASES: dict[str, Callable[[Hosts, Path], dict[str, object]]] = {
    "lost-meeting": lost_meeting,
    "long-cut": long_cut,
    "slow": slow,
}


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder)) as hosts:
        table = epochs.write(Path(folder))
        found = CASES[name](hosts, Path(folder))
        if name == "long-cut":
            found["starts"] = len(epochs.starts(table, Path(folder)))
        print(json.dumps({"case": name, **found}))


if __name__ == "__main__":
    main(sys.argv[1])
