"""The limits of a server: `ServerLimits`."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.common.settings import check, setting
from sluice.dlrm.options import ConfigError
from sluice.ingest.knobs import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of requests, clients and the server."""

    title = "limits"
    max_body: int = setting(
        4 * 2**20,
        "bytes of a request",
        metavar="BYTES",
        parse=parse_bytes,
        show=format_bytes,
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
        512, "connections that are open; each takes a file (ulimit -n)", least=1
    )
    drain: int = setting(20, "how long SIGTERM waits", metavar="SECONDS", least=0)

    def __post_init__(self) -> None:
        check(self, ConfigError)
