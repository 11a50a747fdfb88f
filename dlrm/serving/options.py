"""The options of the server: `ServerOptions`. Imports no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sluice.common.settings import setting
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.knobs import parse_bytes


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of requests, clients and the server."""

    title = "limits"
    max_body: int = setting(
        4 * 2**20,
        "bytes of a request (default: 4 MiB)",
        metavar="BYTES",
        parse=parse_bytes,
        least=1,
    )
    max_rows: int = setting(4096, "rows of a request", least=1)
    timeout: float = setting(
        10.0,
        "for a request's head, its body, and its answer, each",
        metavar="SECONDS",
        above=0,
    )
    max_waiting: int = setting(1024, "requests that wait for the model", least=1)
    max_connections: int = setting(
        512,
        "connections that are open; a further one gets 503. Each takes a file (ulimit -n)",
        least=1,
    )
    drain: int = setting(20, "how long SIGTERM waits", metavar="SECONDS", least=0)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The model to serve, and the address."""

    title = "what"
    run: Path = setting(help="run folder of dlrm.train", metavar="RUN", positional=True)
    best: bool = setting(False, "the checkpoint that did best on validation, not the last")
    host: str = setting(
        "127.0.0.1",
        "address to listen on; with 0.0.0.0 other machines reach it, too, and there is no password",
        metavar="ADDRESS",
    )
    port: int = setting(8000, "0: any that is free", least=0, most=65535)
    reload_every: float = setting(
        5.0, "how often to look for a newer checkpoint; 0: never", metavar="SECONDS"
    )
    threads: int = setting(1, "threads of the model")
    limits: ServerLimits = field(default_factory=ServerLimits)
    code: CodeOptions = field(default_factory=CodeOptions)
