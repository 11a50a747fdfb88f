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
from sluice.common.settings import setting
from sluice.dlrm.options import SERVED_DTYPES
from sluice.dlrm.serving.limits import ServerLimits
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.knobs import format_bytes

if TYPE_CHECKING:
    from sluice.dlrm.serving.scorer import Scorer
    from sluice.etl.table.pins import PinKeeper

Say = Callable[[str], None]
_SWITCH_INTERVAL_S = 1e-4
"""The longest time for which a large batch in another thread keeps the event loop waiting for the interpreter's
lock."""


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
    measure_rows: int = setting(
        200_000,
        "rows of the test split on which the AUC of narrow tables is compared with "
        "that of float32 at the start; 0: none",
    )
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
        from sluice.dlrm.serving.connections import protocol
        from sluice.dlrm.serving.http import HttpApp
        from sluice.dlrm.serving.reload import Reload
        from sluice.dlrm.telemetry.silence_warnings import quiet

        quiet()
        torch.set_num_threads(options.threads)
        self._options = options
        self._pins = pins
        self._say = say
        self._protocol = protocol(options.limits.timeout, options.limits.max_connections)
        try:
            scorer = self._load()
            self._servable = scorer.servable
            say(_tables_text(self._servable, options.measure_rows))
        except OSError as error:
            raise UsageError(str(error)) from None
        gc.collect()
        gc.freeze()  # otherwise each collection of the libraries' and the model's objects delays requests by 0.2 s
        reload = (
            Reload(
                options.run,
                self._load,
                every_s=options.reload_every,
                say=say,
                take_best=options.best,
            )
            if options.reload_every
            else None
        )
        self._service = HttpApp(scorer, options.limits, background=reload)

    def serve(self, listener: socket.socket) -> dict[str, Any]:
        """Answers requests until a signal ends it. Returns counts of the answers."""
        import uvicorn

        # Below this level, hostile requests could fill a log.
        logging.getLogger("uvicorn.error").setLevel("ERROR")
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._service,
                http=self._protocol,
                loop="asyncio",
                ws="none",
                lifespan="off",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                backlog=256,  # further connections are closed
                timeout_keep_alive=60,
                timeout_graceful_shutdown=self._options.limits.drain,
                server_header=False,
            )
        )
        self._interrupted = False
        began = time.monotonic()
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            asyncio.run(self._run_until_stopped(listener))
        finally:
            sys.setswitchinterval(before)
        if self._interrupted:
            raise KeyboardInterrupt
        served = self._service.served
        return {
            "requests": sum(served.statuses.values()),
            "statuses": {str(status): n for status, n in sorted(served.statuses.items())},
            "rows": served.rows,
            "reloads": served.taken,
            "step": self._service.scorer.servable.meta.step,
            "seconds": round(time.monotonic() - began, 1),
        }

    def _load(self) -> Scorer:
        from sluice.dlrm.serving.scorer import Scorer
        from sluice.dlrm.serving.served_model import Servable

        options = self._options
        scorer = Scorer(
            Servable.load(
                options.run,
                options.tables,
                take_best=options.best,
                allow_code=options.code.permission,
            ),
            most_rows=options.limits.max_rows,
        )
        scorer.warm_up()
        self._pins.take(scorer.servable.table.uri, scorer.servable.table.version)
        return scorer

    async def _run_until_stopped(self, listener: socket.socket) -> None:
        ready = asyncio.create_task(self._say_ready(listener))
        background = asyncio.create_task(self._service.run_background())
        await self._server._serve([listener])  # `serve` would also handle signals
        background.cancel()
        await asyncio.gather(background, return_exceptions=True)
        await ready

    async def _say_ready(self, listener: socket.socket) -> None:
        """Reports that the server is ready, and handles signals from then on. Before, a signal ends the program."""
        while not self._server.started:
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        loop.add_signal_handler(signal.SIGINT, self._stop_at_once)
        host, port = listener.getsockname()[:2]
        self._say(
            f"serving {self._servable.path.name} of {self._options.run} on http://{host}:{port}"
        )

    def _stop(self) -> None:
        self._say("asked to leave: requests that have come are still answered")
        self._server.should_exit = True

    def _stop_at_once(self) -> None:
        self._interrupted = True
        self._server.config.timeout_graceful_shutdown = 1
        self._server.should_exit = True


def _tables_text(servable: Any, rows: int) -> str:
    """Returns a text about the memory of the tables and its cost in AUC."""
    from sluice.dlrm.serving.int8_accuracy import compared

    tables = servable.tables
    text = (
        f"tables: {tables.kind}, {format_bytes(tables.bytes)} instead of {format_bytes(tables.wide_bytes)} "
        f"(÷ {tables.wide_bytes / tables.bytes:.2f})"
    )
    if tables.kind == "fp32" or not rows:
        return text
    unknown = f"{text}; what that costs is unknown"
    split = next((s for s in ("test", "validation") if s in servable.table.splits), None)
    if split is None:
        return f"{unknown}: the table has no test split"
    try:
        float32, narrow = compared(servable, split, rows)
    except OSError as error:
        return f"{unknown}: the {split} split cannot be read ({error})"
    if float32.auc is None or narrow.auc is None:
        return f"{unknown}: the {split} split has labels of one kind"
    return (
        f"{text}; AUC {narrow.auc:.6f} instead of {float32.auc:.6f} ({narrow.auc - float32.auc:+.6f}) on "
        f"{float32.rows:,} rows of {split}"
    )
