"""Measures a server on one core: latency with one client, and throughput with many.

    python benchmarks/serving.py RUN [--clients 64] [--seconds 10]
    python benchmarks/serving.py RUN --beside 5 [--rows rows.json]     in turns with the plainest server

RUN was trained on a table of synthetic clicks (as the demo's), or of what `--rows` has, JSON lines of raw rows. Its
server is a process of its own, bound to one core. The clients are in this process, on the other cores. Each request is
one row as JSON, or ten, over connections that stay open. `--beside N` runs N rounds, in each of which this server and
`plain_server.py` are asked by one client and by many. The result is the medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.etl.synth.criteo import CATEGORIES, INTEGERS, Clicks

_ROWS = 2000
_WARM, _TEN = 200, 10


@dataclass
class Seen:
    """What the clients saw."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0

    def percentile(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return (
            ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")
        )

    def to_dict(self, took: float) -> dict[str, Any]:
        return {
            "requests": len(self.seconds),
            "errors": self.errors,
            "per_s": round(len(self.seconds) / took, 1),
            "median_ms": round(1000 * statistics.median(self.seconds or [0]), 2),
            "p99_ms": round(1000 * self.percentile(0.99), 2),
        }


def requests(rows: list[dict[str, Any]], each: int) -> list[bytes]:
    """Requests of so many rows, as bytes on the wire."""
    bodies = []
    for first in range(0, len(rows) - each + 1, each):
        body = json.dumps({"rows": rows[first : first + each]}).encode()
        bodies.append(
            b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
    return bodies


def synthetic_clicks() -> list[dict[str, Any]]:
    clicks = Clicks(7).rows(10_000_000, _ROWS)
    codes = {name: clicks.codes(name) for name in CATEGORIES}
    rows = []
    for n in range(_ROWS):
        row: dict[str, Any] = {
            name: int(clicks.counts[name][n]) for name in INTEGERS if not _null(clicks, name, n)
        }
        rows.append(
            row
            | {
                name: f"{int(codes[name][n]):08x}"
                for name in CATEGORIES
                if not _null(clicks, name, n)
            }
        )
    return rows


def _null(clicks: Any, name: str, n: int) -> bool:
    return name in clicks.nulls and bool(clicks.nulls[name][n])


class Client:
    """One connection that stays open."""

    def __init__(self, port: int, asked: list[bytes], first: int) -> None:
        self._port, self._asked, self._next = port, asked, first

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, seen: Seen) -> None:
        """Sends the next request, and waits for its answer."""
        began = time.perf_counter()
        self._writer.write(self._asked[self._next % len(self._asked)])
        self._next += 1
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await self._reader.readexactly(int(length[1]))
        seen.seconds.append(time.perf_counter() - began)
        seen.errors += head.split()[1] != b"200"

    def close(self) -> None:
        self._writer.close()


async def closed_loop(
    port: int, asked: list[bytes], clients: int, seconds: float
) -> tuple[Seen, float]:
    """Each client asks again as soon as it has its answer."""
    all_of = [Client(port, asked, 31 * n) for n in range(clients)]
    seen = Seen()
    for client in all_of:
        await client.open()
    end = time.perf_counter() + seconds

    async def go(client: Client) -> None:
        while time.perf_counter() < end:
            await client.ask(seen)

    began = time.perf_counter()
    await asyncio.gather(*map(go, all_of))
    took = time.perf_counter() - began
    for client in all_of:
        client.close()
    return seen, took


@contextmanager
def serving(command: list[str], cores: list[int]) -> Iterator[tuple[int, psutil.Process, str]]:
    """A server on the first core: its port, its process and what it said."""
    os.sched_setaffinity(0, cores[:1])  # the server inherits it
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    os.sched_setaffinity(0, cores[1:])
    try:
        told = ""
        for line in process.stderr or ():
            told += line
            if line.startswith("serving"):
                break
        else:
            raise UsageError(f"the server did not start: {told.strip()}")
        yield int(told.rpartition(":")[2]), psutil.Process(process.pid), told
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        if process.stderr is not None:
            process.stderr.close()


def measured(
    port: int, server: psutil.Process, asked: list[bytes], clients: int, seconds: float
) -> dict[str, Any]:
    """A closed loop of clients, and what the server's processor did meanwhile."""
    before = server.cpu_times()
    seen, took = asyncio.run(closed_loop(port, asked, clients, seconds))
    spent = server.cpu_times()
    used = spent.user + spent.system - before.user - before.system
    return {
        **seen.to_dict(took),
        "server_cores": round(used / took, 2),
        "server_us_a_request": round(1e6 * used / max(1, len(seen.seconds))),
    }


def beside(
    commands: dict[str, list[str]], cores: list[int], asked: list[bytes], args: argparse.Namespace
) -> dict[str, Any]:
    """Both servers are up; rounds of one client and of many, each time in another order."""
    rounds: list[dict[str, dict[str, Any]]] = []
    with serving(commands["plain"], cores) as plain, serving(commands["sluice"], cores) as ours:
        ports = {"plain": plain, "sluice": ours}
        for number in range(args.beside):
            rounds.append({})
            for name in list(ports) if number % 2 else list(ports)[::-1]:
                port, server, _ = ports[name]
                for clients in (1, args.clients):
                    rounds[-1][f"{name}_{clients}"] = measured(
                        port, server, asked, clients, args.seconds
                    )
            say(f"round {number + 1}: {rounds[-1]}")
    result: dict[str, Any] = {"rounds": rounds}
    for clients in (1, args.clients):
        for figure in ("per_s", "median_ms", "p99_ms", "server_us_a_request"):
            ratios = [
                turn[f"sluice_{clients}"][figure] / max(1e-9, turn[f"plain_{clients}"][figure])
                for turn in rounds
            ]
            result[f"{clients}_clients_{figure}"] = round(statistics.median(ratios), 3)
    return result


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=10, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="JSON lines of raw rows; none: synthetic clicks"
    )
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="rounds beside the plainest server"
    )
    args = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UsageError("the server has a core of its own here: two are needed")
    command = [
        sys.executable,
        "-m",
        "dlrm.serve",
        str(args.run),
        "--port",
        "0",
        "--reload-every",
        "0",
    ]
    rows = synthetic_clicks()
    if args.rows:
        rows = [json.loads(line) for line in args.rows.read_text().splitlines()[:_ROWS]]
    asked = requests(rows, 1)
    if args.beside:
        plain = [sys.executable, str(Path(__file__).with_name("plain_server.py")), str(args.run)]
        return beside({"plain": plain, "sluice": command}, cores, asked, args)
    with serving(command, cores) as (port, server, told):
        say(told.strip())
        asyncio.run(closed_loop(port, asked, 1, _WARM / 200))
        figures: dict[str, Any] = {"one_client": measured(port, server, asked, 1, args.seconds)}
        say(f"one client: {figures['one_client']}")
        figures["clients"] = many = measured(port, server, asked, args.clients, args.seconds)
        say(f"{args.clients} clients: {many}")
        tens = measured(port, server, requests(rows, _TEN), args.clients, args.seconds)
        figures["tens"] = {**tens, "rows_per_s": _TEN * tens["per_s"]}
        say(f"{args.clients} clients, {_TEN} rows a request: {figures['tens']}")
        return {**figures, "tables": told.splitlines()[0]}


if __name__ == "__main__":
    run(main)
