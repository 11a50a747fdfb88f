"""Runs the server: its options, its port, its model, and how it starts and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.common.errors import UsageError
from sluice.common.settings import check, setting
from sluice.dlrm.options import SERVED_DTYPES, ConfigError
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.knobs import format_bytes, parse_bytes

if TYPE_CHECKING:
    from sluice.dlrm.serving.scorer import Scorer
    from sluice.etl.table.pins import PinKeeper

Say = Callable[[str], None]
_SWITCH_INTERVAL_S = 1e-4
"""The longest time for which a large batch in another thread keeps the event loop waiting for the interpreter's
lock."""


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

    def __post_init__(self) -> None:
        check(self, ConfigError)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The model to serve, the form of its tables, and the address."""

    title = "what"
    run: Path = setting(help="run folder of dlrm.train", metavar="RUN", positional=True)
    best: bool = setting(False, "the checkpoint that did best on validation, not the last")
    host: str = setting(
        "127.0.0.1",
        "address to listen on; with 0.0.0.0 other machines reach it, too, and there is no password",
        metavar="ADDRESS",
    )
    port: int = setting(8000, "0: any that is free")
    tables: str = setting("int8", "how embedding tables are held", choices=SERVED_DTYPES)
    reload_every: float = setting(
        5.0, "how often to look for a newer checkpoint; 0: never", metavar="SECONDS"
    )
    threads: int = setting(1, "threads of the model")
    limits: ServerLimits = field(default_factory=ServerLimits)
    code: CodeOptions = field(default_factory=CodeOptions)


def serve(options: ServerOptions, say: Say) -> dict[str, Any]:
    """Serves until a signal ends it. Returns counts of the answers."""
    from sluice.etl.table.pins import PinKeeper

    host, port = options.host, options.port
    if not 0 <= port < 2**16:
        raise UsageError(f"--port {port}: must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The port is opened before the model is loaded, so that a wrong port is reported at once.
    # The protocol must be given as TCP. Otherwise asyncio does not set TCP_NODELAY, and an answer waits 40 ms for the
    # client to acknowledge its head.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            raise UsageError(
                f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another --port, "
                "or 0 for any that is free"
            ) from None
        with PinKeeper(f"serve-{options.run.name}", say) as pins:
            return Server(options, pins, say).serve(listener)


class Server:
    """A model behind a port."""

    def __init__(self, options: ServerOptions, pins: PinKeeper, say: Say) -> None:
        import torch

        # Imported first, so that a missing package is reported before the model is loaded.
        import uvicorn

        from sluice.dlrm.serving.connections import protocol
        from sluice.dlrm.serving.http import HttpApp
        from sluice.dlrm.serving.reload import Reload
        from sluice.dlrm.telemetry.silence_warnings import quiet

        quiet()
        torch.set_num_threads(options.threads)
        self._options, self._pins, self._say = options, pins, say
        try:
            scorer = self._load()
        except OSError as error:
            raise UsageError(str(error)) from None
        tables = scorer.servable.tables
        say(
            f"tables: {tables.kind}, {format_bytes(tables.bytes)} instead of {format_bytes(tables.wide_bytes)} "
            f"(÷ {tables.wide_bytes / tables.bytes:.2f})"
        )
        gc.collect()
        gc.freeze()  # otherwise each collection of the libraries' and the model's objects delays requests by 0.2 s
        self._reload = None
        if options.reload_every:
            self._reload = Reload(
                options.run,
                self._load,
                every_s=options.reload_every,
                say=say,
                take_best=options.best,
            )
        limits = options.limits
        self._app = HttpApp(scorer, limits, reload=self._reload)
        # Below this level, hostile requests could fill a log.
        logging.getLogger("uvicorn.error").setLevel("ERROR")
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                http=protocol(limits.timeout, limits.max_connections),
                loop="asyncio",
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                backlog=256,  # further connections are closed
                timeout_keep_alive=60,
                timeout_graceful_shutdown=limits.drain,
                server_header=False,
            )
        )
        self._interrupted = False

    def serve(self, listener: socket.socket) -> dict[str, Any]:
        """Answers requests until a signal ends it. Returns counts of the answers."""
        began = time.monotonic()
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            asyncio.run(self._run(listener))
        finally:
            sys.setswitchinterval(before)
        if self._interrupted:
            raise KeyboardInterrupt
        served = self._app.served
        value = served.registry.get_sample_value
        return {
            "requests": served.statuses.total(),
            "statuses": {str(status): n for status, n in sorted(served.statuses.items())},
            "rows": int(value("sluice_serve_rows_total") or 0),
            "reloads": int(value("sluice_serve_reloads_total", {"result": "taken"}) or 0),
            "step": self._app.scorer.servable.meta.step,
            "seconds": round(time.monotonic() - began, 1),
        }

    def _load(self) -> Scorer:
        from sluice.dlrm.serving.scorer import Scorer
        from sluice.dlrm.serving.served_model import Servable

        options = self._options
        servable = Servable.load(
            options.run,
            options.tables,
            take_best=options.best,
            allow_code=options.code.permission,
        )
        scorer = Scorer(servable, most_rows=options.limits.max_rows)
        scorer.warm_up()
        self._pins.take(servable.table.uri, servable.table.version)
        return scorer

    async def _run(self, listener: socket.socket) -> None:
        # As uvicorn's own `serve`, but signals are handled here. Before the server is ready, a signal ends the program.
        server = self._server
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop, signum)
        host, port = listener.getsockname()[:2]
        checkpoint = self._app.scorer.servable.path.name
        self._say(f"serving {checkpoint} of {self._options.run} on http://{host}:{port}")
        reloading = loop.create_task(self._reload(self._app)) if self._reload else None
        await server.main_loop()
        if reloading is not None:
            reloading.cancel()
        await server.shutdown(sockets=[listener])

    def _stop(self, signum: int) -> None:
        if signum == signal.SIGINT:
            self._interrupted = True
            self._server.config.timeout_graceful_shutdown = 1
        else:
            self._say("asked to leave: requests that have come are still answered")
        self._server.should_exit = True
