"""`sluice live RUN …` and `--live PORT`: the page of a growing run, on this machine only, read only.

When a run writes something, the server sends an event to the browser, and the browser reloads the page. A separate
process makes the page. It works at most a tenth of the time, so that it does not slow the run down.
"""

from __future__ import annotations

import http.server
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sluice.agent.report import narrative, page
from sluice.agent.report.live_server import HOST
from sluice.agent.report.run_folder import Run
from sluice.agent.report.tables import table
from sluice.common.errors import UsageError

_LOOK_S = 1.0
"""Seconds between two looks at the files of a run."""
_SHARE = 0.1
"""The largest share of the time in which a page is made."""
_LAST_S = 1.5
"""Seconds that browsers have to load the last page."""
_FOLLOW = """<script>
new EventSource("changes").onmessage = async () => {
  const answer = await fetch("."), text = await answer.text();
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(text, "text/html"), at = [scrollX, scrollY];
  const open = [...document.querySelectorAll("details")].map(one => one.open);
  document.title = fresh.title;
  document.body.replaceWith(fresh.body);
  document.querySelectorAll("details").forEach((one, n) => one.open = open[n] ?? one.open);
  drawAll();
  scrollTo(...at);
};
</script>
<link rel="icon" href="data:,">
"""


def _following(text: str) -> str:
    """Returns the page with a script that reloads it when the run has written something."""
    return text.replace("</head>", f"{_FOLLOW}</head>")


class Kept:
    """A cached result of a growing run. It is made again when the run has grown, at most a tenth of the time."""

    def __init__(
        self,
        make: Callable[[], str],
        stamp: Callable[[], tuple[int, ...]],
        clock: Callable[[], float],
    ) -> None:
        self._make = make
        self._stamp = stamp
        self._clock = clock
        self._lock = threading.Lock()
        self._made: tuple[tuple[int, ...], str] | None = None
        self._not_before = 0.0

    def get(self) -> str:
        """Returns the present result, or a recent one if making it takes long."""
        with self._lock:
            stamp = self._stamp()
            began = self._clock()
            if self._made is None or (self._made[0] != stamp and began >= self._not_before):
                self._made = stamp, self._make()
                self._not_before = self._clock() + (self._clock() - began) * (1 / _SHARE - 1)
            return self._made[1]


class LiveRun:
    """One run's page and verdict. Each is made again when the run folder has grown."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.page = Kept(self._page, self.stamp, clock).get
        self.verdict = Kept(self._verdict, self.stamp, clock).get

    def stamp(self) -> tuple[int, ...]:
        """Returns the sizes of the run's files. They change with every line."""
        return tuple(
            file.stat().st_size if (file := self.path / name).exists() else -1
            for name in ("config.json", "events.jsonl", "metrics.jsonl")
        )

    def _page(self) -> str:
        text = (
            page.page(Run.read(self.path))
            if (self.path / "config.json").exists()
            else page.filled(
                title=self.path.name,
                name=self.path.name,
                headline="The run is being prepared: nothing is measured yet.",
                rest="",
                footer="",
            )
        )
        return _following(text)

    def _verdict(self) -> str:
        try:
            return narrative.verdict(Run.read(self.path))
        except UsageError as error:
            return str(error)


class LivePages(http.server.ThreadingHTTPServer):
    """Serves the pages of some runs. `/` is the page of a single run, or a list of several. `/1/` is the first run."""

    daemon_threads = True

    def __init__(self, sock: socket.socket, runs: Sequence[Path]) -> None:
        super().__init__((HOST, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = sock, sock.getsockname()
        self.runs = {str(number): LiveRun(path) for number, path in enumerate(runs, 1)}
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def index(self) -> str:
        """Returns the page that lists all runs."""
        rows = [
            [f'<a href="{number}/">{escape(str(run.path))}</a>', escape(run.verdict())]
            for number, run in self.runs.items()
        ]
        return _following(
            page.filled(
                title="runs",
                name="",
                headline=f"{len(self.runs)} runs",
                rest="",
                footer="",
                charts=f"<section>{table(('run', 'verdict'), rows, kind='story', classes=('m',))}</section>",
            )
        )

    def stamp(self) -> tuple[int, ...]:
        """Returns the sizes of the files of all runs."""
        return tuple(size for run in self.runs.values() for size in run.stamp())

    def end(self) -> None:
        """Lets browsers load the page once more, then ends."""
        self.over.set()
        time.sleep(_LAST_S)
        self.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LivePages
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def do_GET(self) -> None:
        # Another site may point its own name at this address. Such requests are refused.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(403, "this page is only for 127.0.0.1")
            return
        runs = self.server.runs
        path = self.path.partition("?")[0]
        if len(runs) > 1 and path == "/":
            self._answer(self.server.index())
            return
        if len(runs) > 1 and path == "/changes":
            self._changes(self.server)
            return
        first, _, rest = path.removeprefix("/").partition("/")
        if len(runs) == 1 and first in ("", "changes"):
            run, rest = runs["1"], first
        elif first in runs and path.startswith(f"/{first}/"):
            run = runs[first]
        else:
            self.send_error(404, "there is no such page")
            return
        if rest == "changes":
            self._changes(run)
        elif rest:
            self.send_error(404, "there is no such page")
        else:
            try:
                self._answer(run.page())
            except UsageError as error:
                self.send_error(503, "the run cannot be read now", str(error))

    def _answer(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _changes(self, run: LiveRun | LivePages) -> None:
        """Sends an event whenever a run has written something, until the browser leaves or the server ends."""
        seen = run.stamp()
        over = False
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        while not over:
            over = self.server.over.wait(_LOOK_S)
            if select.select([self.connection], [], [], 0)[0]:
                return  # The browser has closed the connection.
            now = run.stamp()
            try:
                self.wfile.write(b"data: changed\n\n" if over or now != seen else b": here\n\n")
            except OSError:
                return
            seen = now

    def log_message(self, *_: Any) -> None:
        """Writes nothing: requests do not belong on the terminal."""


def serve(descriptor: str, run: str) -> None:
    """Serves a run's page on this socket until standard input ends. It is the main function of a separate process."""
    with LivePages(socket.socket(fileno=int(descriptor)), [Path(run)]) as pages:
        threading.Thread(target=pages.serve_forever).start()
        os.read(0, 1)
        pages.end()
