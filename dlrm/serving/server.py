"""Runs the server: `serve` loads a model, and answers on a port until a signal ends it. `take_newer` loads a newer
checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import uvicorn

from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.dlrm.checkpoint.meta import find_checkpoint
from sluice.dlrm.serving.connections import GuardedProtocol
from sluice.dlrm.serving.http import HttpApp, iso_time
from sluice.dlrm.serving.options import ServerOptions
from sluice.dlrm.serving.scorer import Scorer
from sluice.dlrm.serving.served_model import Servable
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.etl.table.pins import PinKeeper
from sluice.ingest.knobs import format_bytes

Load = Callable[[], Scorer]
_SWITCH_INTERVAL_S = 1e-4
"""The longest time for which a large batch in another thread keeps the event loop waiting for the interpreter's
lock."""


def serve(options: ServerOptions, listener: socket.socket) -> dict[str, Any]:
    """Serves until a signal ends it. Returns counts of the answers."""
    quiet()
    torch.set_num_threads(options.threads)
    with PinKeeper(f"serve-{options.run.name}", say) as pins:
        load = partial(_load, options, pins)
        try:
            scorer = load()
        except OSError as error:
            raise UsageError(str(error)) from None
        about = scorer.servable.about()
        say(f"The tables take {format_bytes(about['table_bytes'])} as {about['tables']}.")
        gc.collect()
        gc.freeze()  # otherwise each collection of the libraries' and the model's objects delays requests by 0.2 s
        app = HttpApp(scorer, options.limits)
        began, before = time.monotonic(), sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            signals = asyncio.run(_run(options, app, listener, load))
        finally:
            sys.setswitchinterval(before)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    value, statuses = app.served.registry.get_sample_value, app.served.statuses
    return {
        "requests": statuses.total(),
        "statuses": {str(status): n for status, n in sorted(statuses.items())},
        "rows": int(value("sluice_serve_rows_total") or 0),
        "reloads": int(value("sluice_serve_reloads_total", {"result": "taken"}) or 0),
        "step": app.scorer.servable.meta.step,
        "seconds": round(time.monotonic() - began, 1),
    }


def _load(options: ServerOptions, pins: PinKeeper) -> Scorer:
    servable = Servable.load(
        options.run, take_best=options.best, allow_code=options.code.permission
    )
    scorer = Scorer(servable, most_rows=options.limits.max_rows)
    for rows in (1, 1024):  # what is built at first use is built now
        scorer.answer([b'{"rows":[%s]}' % b",".join([b"{}"] * rows)])
    scorer.missing.clear()
    pins.take(servable.table.uri, servable.table.version)
    return scorer


async def _run(
    options: ServerOptions, app: HttpApp, listener: socket.socket, load: Load
) -> list[int]:
    """Answers requests until a signal comes. Returns the signals."""
    # Below this level, hostile requests could fill a log.
    logging.getLogger("uvicorn.error").setLevel("ERROR")
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        backlog=256,  # further connections are closed
        timeout_keep_alive=60,
        timeout_graceful_shutdown=options.limits.drain,
        server_header=False,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    signals: list[int] = []

    def stop(signum: int) -> None:
        signals.append(signum)
        if signum == signal.SIGINT:
            config.timeout_graceful_shutdown = 1
        else:
            say("asked to leave: requests that have come are still answered")
        server.should_exit = True

    async def keep_newest() -> None:
        while options.reload_every:
            await take_newer(app, load, take_best=options.best)
            await asyncio.sleep(options.reload_every)

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    host, port = listener.getsockname()[:2]
    say(f"serving {app.scorer.servable.path.name} of {options.run} on http://{host}:{port}")
    reloading = loop.create_task(keep_newest())
    await server.serve([listener])
    reloading.cancel()
    return signals


async def take_newer(app: HttpApp, load: Load, *, take_best: bool = False) -> bool:
    """Answers with the run's newest or best checkpoint once it is loaded. Returns whether it is another than before.

    A model that cannot be loaded is reported once, and tried again at each call. Its errors do not stop the server."""
    try:
        served = app.scorer.servable
        look = partial(find_checkpoint, served.path.parent, take_best=take_best)
        is_newer = await asyncio.to_thread(look) != (served.path, served.meta)
        if is_newer:
            app.take(await asyncio.to_thread(load))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a user's module may raise any error, even SystemExit
        # The message of an error of a run, its table or its state suffices without the class.
        is_usual = isinstance(error, UsageError | OSError)
        text = str(error) if is_usual else f"{type(error).__name__}: {error}"
        if text == app.reload.get("error"):
            return False
        app.reload = {"failing": True, "error": text, "since": iso_time(app.wall_clock())}
        app.served.refused.inc()
        report = f"a newer checkpoint cannot be served, so the one before it stays: {text}"
    else:
        app.reload = {"failing": False, "error": None}
        if not is_newer:
            return False
        app.served.taken.inc()
        about = app.scorer.servable.about()
        report = (
            f"now serving {about['checkpoint']}, trained on version {about['version']} of the table"
        )
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        say(report)
    return not app.reload["failing"]
