"""Serves a run's newest checkpoint over HTTP: raw features in, probabilities out, with the spec and the fitted state
that the model was trained with.

    sluice serve run --port 8000
    curl -s http://127.0.0.1:8000/predict -H 'content-type: application/json' \\
        -d '{"rows": [{"I1": 3, "C1": "68fd1e64"}]}'

POST /predict takes {"rows": [{feature: value, …}, …]}, or an Arrow IPC stream (content-type
application/vnd.apache.arrow.stream). A feature that is not named is missing, as an empty cell is in training: the
spec's default stands there, and it is counted. GET /model says which features there are, /health whether the server is
well, /metrics is for Prometheus. A newer checkpoint takes over as soon as it is whole. SIGTERM answers what was asked,
and leaves.

The last line of standard output is one JSON object: requests by status, rows, models taken over. A port of 0 finds a
free one; the line that begins with "serving" names it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from sluice.dlrm.serving.int8_tables import KINDS
from sluice.dlrm.serving.limits import ServerLimits
from sluice.dlrm.serving.pace import Pace
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run, say
from sluice.etl.spec import code_options
from sluice.etl.table.pins import Hold
from sluice.ingest.knobs import format_bytes, parse_bytes

_SWITCH_S = 1e-4
"""The longest time for which a large batch, in its thread, keeps the interpreter's lock from the event loop."""
_ACCEPTED = 256
"""How many connections are accepted before one that they push out is closed."""
_FILES = _ACCEPTED + 256
"""Files that the process needs beside the open connections."""


def affordable(connections: int, soft: int, hard: int) -> tuple[int, int]:
    """How many connections may be open, and which limit of files (RLIMIT_NOFILE) to set, for a process with these soft
    and hard limits; -1: no limit."""
    needed = connections + _FILES
    if soft < 0 or soft >= needed:
        return connections, soft
    if hard < 0 or hard >= needed:
        return connections, needed
    return max(1, hard - _FILES), hard


def _connections(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found, files = affordable(wanted, soft, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if found < wanted:
        say(f"--max-connections {wanted}: {found}, as this process may open {hard} files (ulimit -Hn)")
    return found


def parser() -> argparse.ArgumentParser:
    of = ServerLimits()
    described = ArgumentParser(prog="sluice serve", description=__doc__,
                               formatter_class=argparse.RawDescriptionHelpFormatter)
    add = described.add_argument
    add("run", type=Path, metavar="RUN", help="run folder of dlrm.train")
    add("--best", action="store_true", help="the checkpoint that did best on validation, not the last")
    add("--host", default="127.0.0.1", help="address to listen on; with 0.0.0.0 other machines reach it, too, and "
        "there is no password (default: %(default)s)")
    add("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    add("--tables", choices=KINDS, default="int8", help="how embedding tables are held (default: %(default)s)")
    add("--measure-rows", type=int, default=200_000, metavar="N", help="rows of the test split on which the AUC of "
        "narrow tables is compared with that of float32 at the start; 0: none (default: %(default)s)")
    add("--reload-every", type=float, default=5.0, metavar="SECONDS", help="how often to look for a newer checkpoint; "
        "0: never (default: %(default)s)")
    add("--threads", type=int, default=1, help="of the model (default: %(default)s)")
    code_options.add_options(described)
    add = described.add_argument_group("limits").add_argument
    add("--max-body", type=parse_bytes, default=of.body_bytes, metavar="BYTES", help="of a request (default: 4MiB)")
    add("--max-rows", type=int, default=of.rows, metavar="N", help="of a request (default: %(default)s)")
    add("--timeout", type=float, default=of.seconds, metavar="SECONDS",
        help="for a request's head, its body, and its answer, each (default: %(default)s)")
    add("--rate", type=float, default=of.rate, metavar="N", help="requests a second; 0: any number (default: 0)")
    add("--max-waiting", type=int, default=of.waiting, metavar="N", help="requests that wait (default: %(default)s)")
    add("--max-connections", type=int, default=of.connections, metavar="N", help="(default: %(default)s)")
    add("--drain", type=int, default=20, metavar="SECONDS", help="how long SIGTERM waits (default: %(default)s)")
    return described


def main(argv: list[str]) -> dict[str, Any]:
    args = parser().parse_args(argv)
    connections = _connections(args.max_connections)
    limits = ServerLimits(body_bytes=args.max_body, rows=args.max_rows, seconds=args.timeout, rate=args.rate,
                          waiting=args.max_waiting, connections=connections)
    # The port is opened before the model is loaded: a wrong one is reported at once.
    with _listening(args.host, args.port) as listener, Hold(f"serve-{args.run.name}", say) as hold:
        return _serve(args, limits, listener, hold)


def _serve(args: argparse.Namespace, limits: ServerLimits, listener: socket.socket, hold: Hold) -> dict[str, Any]:
    import torch
    import uvicorn

    from sluice.dlrm.serving.connections import protocol
    from sluice.dlrm.serving.http import HttpApp
    from sluice.dlrm.serving.reload import Reload
    from sluice.dlrm.serving.scorer import Scorer
    from sluice.dlrm.serving.served_model import Servable
    from sluice.dlrm.telemetry.silence_warnings import quiet

    quiet()
    torch.set_num_threads(args.threads)
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # what libraries made stays: a collection that goes through it all holds everybody up for 0.2 s

    def load() -> tuple[Scorer, Pace]:
        scorer = Scorer(Servable.load(args.run, args.tables, take_best=args.best,
                                      allow_code=code_options.given(args)), most_rows=limits.rows)
        pace = scorer.warmed_up()
        hold.take(scorer.servable.table.uri, scorer.servable.table.version)
        return scorer, pace

    try:
        first, pace = load()
        servable = first.servable
        say(_tables(servable, args.measure_rows))
    except OSError as error:
        raise UsageError(str(error)) from None

    follow = Reload(args.run, lambda: load()[0], every_s=args.reload_every, say=say,
                    take_best=args.best) if args.reload_every else None
    service = HttpApp(first, limits, beside=follow, pace=pace)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # hostile requests may not fill a log
    server = uvicorn.Server(uvicorn.Config(
        service.app, http=protocol(limits.seconds, limits.connections), loop="asyncio", ws="none", log_config=None,
        access_log=False, backlog=_ACCEPTED, timeout_keep_alive=60, timeout_graceful_shutdown=args.drain,
        server_header=False))

    def leave() -> None:
        say("asked to leave: what was asked is still answered")
        server.should_exit = True

    interrupted = asyncio.Event()

    def leave_at_once() -> None:
        interrupted.set()
        server.config.timeout_graceful_shutdown = 1
        server.should_exit = True

    async def told() -> None:
        """Says that the server is up and takes signals from then on; before that, a signal ends the program as any
        other."""
        while not server.started:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, leave_at_once)
        host, port = listener.getsockname()[:2]
        say(f"serving {servable.path.name} of {args.run} on http://{host}:{port}")

    async def until_left() -> None:
        telling = asyncio.create_task(told())
        await server._serve([listener])  # `serve` would also take signals, and end by them
        await telling

    began = time.monotonic()
    asyncio.run(until_left())
    if interrupted.is_set():
        raise KeyboardInterrupt
    return {"requests": sum(service.served.statuses.values()),
            "statuses": {str(status): n for status, n in sorted(service.served.statuses.items())},
            "rows": service.served.rows, "reloads": service.served.taken,
            "step": service.scorer.servable.meta.step, "seconds": round(time.monotonic() - began, 1)}


def _tables(servable: Any, rows: int) -> str:
    """Says how much memory the tables take, and what that costs in AUC."""
    from sluice.dlrm.serving.int8_accuracy import compared

    tables = servable.tables
    text = (f"tables: {tables.kind}, {format_bytes(tables.bytes)} instead of {format_bytes(tables.wide_bytes)} "
            f"(÷ {tables.wide_bytes / tables.bytes:.2f})")
    if tables.kind == "fp32" or not rows:
        return text
    split = next((s for s in ("test", "validation") if s in servable.table.splits), None)
    if split is None:
        return f"{text}; what that costs is unknown: the table has no test split"
    try:
        wide, narrow = compared(servable, split, rows)
    except OSError as error:
        return f"{text}; what that costs is unknown: the {split} split cannot be read ({error})"
    if wide.auc is None or narrow.auc is None:
        return f"{text}; what that costs is unknown: the {split} split has labels of one kind"
    return (f"{text}; AUC {narrow.auc:.6f} instead of {wide.auc:.6f} ({narrow.auc - wide.auc:+.6f}) on {wide.rows:,} "
            f"rows of {split}")


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    if not 0 <= port < 2**16:
        raise UsageError(f"--port {port}: must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only over sockets that are told to be TCP: else an answer waits 40 ms for the
    # client to acknowledge its head.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            raise UsageError(f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another --port, "
                             "or 0 for any that is free") from None
        yield listener


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
