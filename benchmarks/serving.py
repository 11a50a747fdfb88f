"""Measures a server on one core: latency with one client, throughput with many, and a soak test below that rate.

    python benchmarks/serving.py RUN [--clients 64] [--seconds 10] [--soak 600] [--tables int8] [--attack 128]
    python benchmarks/serving.py RUN --beside 5 [--rows rows.json]     in turns with the plainest server

RUN was trained on a table of synthetic clicks (as the demo's), or of what `--rows` has, JSON lines of raw rows; its
server is a process of its own, bound to one core, and the clients are in this process, on the others. Each request is
one row as JSON, or ten, over connections that stay open. `--beside N` measures only that: N rounds, in each of which
this server and `plain_server.py` are asked by one client and by many; told are medians of the rounds' ratios.
The soak asks at a steady rate, 80 % of the most that was answered, and looks at the server's memory at its first
fifth and at its end. A request's time counts from when it was due, so it includes the wait for a free connection after
an interruption; `server_p99_ms_at_most` is from the server's own histogram. The attack is so many requests of 4,096
empty rows at one time: how they are answered, and how long /health takes meanwhile, asked every 20 ms over connections
of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.etl.synth.criteo import CATEGORIES, INTEGERS, Clicks

_ROWS = 2000
_WARM, _TEN = 200, 10
_MOST_ROWS = 4096


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
    found = []
    for first in range(0, len(rows) - each + 1, each):
        body = json.dumps({"rows": rows[first : first + each]}).encode()
        found.append(
            b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
    return found


def synthetic_clicks() -> list[dict[str, Any]]:
    clicks = Clicks(7).rows(10_000_000, _ROWS)
    codes = {name: clicks.codes(name) for name in CATEGORIES}
    found = []
    for n in range(_ROWS):
        row: dict[str, Any] = {
            name: int(clicks.counts[name][n]) for name in INTEGERS if not _null(clicks, name, n)
        }
        found.append(
            row
            | {
                name: f"{int(codes[name][n]):08x}"
                for name in CATEGORIES
                if not _null(clicks, name, n)
            }
        )
    return found


def _null(clicks: Any, name: str, n: int) -> bool:
    return name in clicks.nulls and bool(clicks.nulls[name][n])


class Client:
    """One connection that stays open."""

    def __init__(self, port: int, asked: list[bytes], first: int) -> None:
        self._port, self._asked, self._next = port, asked, first

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, seen: Seen, due: float | None = None) -> None:
        """One request. Its time counts from when it was due: a client that comes late must not hide a wait."""
        began = time.perf_counter() if due is None else due
        status = await self.said()
        seen.seconds.append(time.perf_counter() - began)
        seen.errors += status != "200"

    async def said(self) -> str:
        """The status of the next request's answer."""
        self._writer.write(self._asked[self._next % len(self._asked)])
        self._next += 1
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        await self._reader.readexactly(int(length[1]))
        return head.split()[1].decode()

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


async def steady(
    port: int,
    asked: list[bytes],
    *,
    clients: int,
    seconds: float,
    rate: float,
    look: Callable[[], None],
) -> Seen:
    """So many requests a second, each at its time. A client that is free takes the next one and waits for its time."""
    all_of = [Client(port, asked, 31 * n) for n in range(clients)]
    for client in all_of:
        await client.open()
    seen, numbers = Seen(), iter(range(int(rate * seconds)))
    began = time.perf_counter()

    async def go(client: Client) -> None:
        for number in numbers:
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if number == int(rate * seconds / 5):
                look()
            await client.ask(seen, due)

    await asyncio.gather(*map(go, all_of))
    for client in all_of:
        client.close()
    return seen


async def flood(port: int, requests: int) -> dict[str, Any]:
    """So many requests of the most rows at one time: how many are answered in which way, and when the last is."""
    body = b'{"rows":[%s]}' % b",".join([b"{}"] * _MOST_ROWS)
    empty_rows = [
        b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    ]

    async def one() -> str:
        client = Client(port, empty_rows, 0)
        await client.open()
        status = await client.said()
        client.close()
        return status

    began = time.perf_counter()
    statuses = Counter(await asyncio.gather(*(one() for _ in range(requests))))
    return {
        "requests": requests,
        "rows_each": _MOST_ROWS,
        "statuses": dict(statuses),
        "last_answer_s": round(time.perf_counter() - began, 2),
    }


def own_seconds(port: int) -> dict[float, float]:
    """The server's own histogram: how many requests it has answered within so many seconds, from head to answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'sluice_serve_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    return {float(bound): float(count) for bound, count in found}


def own_p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """The least bound of the histogram within which 99 of 100 requests were answered."""
    all_of = after[float("inf")] - before[float("inf")]
    return 1000 * min(bound for bound in after if after[bound] - before[bound] >= 0.99 * all_of)


def flooded(port: int, requests: int) -> dict[str, Any]:
    return asyncio.run(flood(port, requests))


def attack(port: int, requests: int) -> dict[str, Any]:
    """The flood comes from a process of its own, so that its work is no part of the times of /health."""
    seen = Seen()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(flooded, port, 0).result()  # it has started
        begun = pool.submit(flooded, port, requests)
        while not begun.done():
            began = time.perf_counter()
            with socket.create_connection(("127.0.0.1", port), timeout=60) as well:
                well.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                while well.recv(65536):
                    pass
            seen.seconds.append(time.perf_counter() - began)
            time.sleep(0.02)
    return {
        **begun.result(),
        "health": len(seen.seconds),
        "health_median_ms": round(1000 * statistics.median(seen.seconds), 1),
        "health_p99_ms": round(1000 * seen.percentile(0.99), 1),
        "health_max_ms": round(1000 * max(seen.seconds), 1),
    }


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
    found: dict[str, Any] = {"rounds": rounds}
    for clients in (1, args.clients):
        for figure in ("per_s", "median_ms", "p99_ms", "server_us_a_request"):
            ratios = [
                one[f"sluice_{clients}"][figure] / max(1e-9, one[f"plain_{clients}"][figure])
                for one in rounds
            ]
            found[f"{clients}_clients_{figure}"] = round(statistics.median(ratios), 3)
    return found


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
        "--soak",
        type=float,
        default=600,
        help="seconds of the soak; 0: none (default: %(default)s)",
    )
    parser.add_argument("--tables", default="int8")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="JSON lines of raw rows; none: synthetic clicks"
    )
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="rounds beside the plainest server"
    )
    parser.add_argument(
        "--attack",
        type=int,
        default=128,
        metavar="N",
        help="requests of 4,096 empty rows at one time; 0: none (default: %(default)s)",
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
        "--tables",
        args.tables,
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
        found: dict[str, Any] = {"one_client": measured(port, server, asked, 1, args.seconds)}
        say(f"one client: {found['one_client']}")
        found["clients"] = many = measured(port, server, asked, args.clients, args.seconds)
        say(f"{args.clients} clients: {many}")
        tens = measured(port, server, requests(rows, _TEN), args.clients, args.seconds)
        found["tens"] = {**tens, "rows_per_s": _TEN * tens["per_s"]}
        say(f"{args.clients} clients, {_TEN} rows a request: {found['tens']}")
        if args.soak:
            memory: list[int] = []
            earlier = own_seconds(port)
            soak = asyncio.run(
                steady(
                    port,
                    asked,
                    clients=args.clients,
                    seconds=args.soak,
                    rate=0.8 * many["per_s"],
                    look=lambda: memory.append(server.memory_info().rss),
                )
            )
            found["soak"] = {
                **soak.to_dict(args.soak),
                "seconds": args.soak,
                "server_p99_ms_at_most": own_p99_ms(earlier, own_seconds(port)),
                "grown_bytes": server.memory_info().rss - memory[0],
                "bytes": memory[0],
            }
            say(f"soak: {found['soak']}")
        if args.attack:
            found["attack"] = attack(port, args.attack)
            say(f"attack: {found['attack']}")
        return {**found, "tables": told.splitlines()[0]}


if __name__ == "__main__":
    run(main)
