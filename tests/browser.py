"""A headless Chromium, driven over the pipe that its DevTools offer: no port, no other package."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUNNING: set[int] = set()
"""Browsers that run now, by process id. They start and end processes of their own whenever they like."""

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WITHOUT = "no chromium here; Debian has it: apt-get install chromium"
_AT_3_AND_4 = """import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4), os.execv(sys.argv[3], sys.argv[3:])"""


class Browser:
    """One page of a browser. It gathers what the page says on the console."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out, self._number, self._rest = into, out, 0, b""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of DevTools and waits for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        return self._until(lambda answer: answer.get("id") == self._number)["result"]

    def _until(self, wanted: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._out, 2**16)
                assert more, "the browser has ended"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            assert "error" not in message, message
            self._listen(message)
            if wanted(message):
                return message

    def _listen(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and told["type"] in (
            "error",
            "warning",
        ):
            self.complaints.append(str(told["args"]))
        elif message.get("method") == "Log.entryAdded" and told["entry"]["level"] in (
            "error",
            "warning",
        ):
            self.complaints.append(told["entry"]["text"])

    def open(self, url: str, *, width: int) -> None:
        """Shows a page at this width, in light, and waits until it has been loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.dark(False)
        self.call("Page.navigate", url=url)
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def dark(self, dark: bool) -> None:
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        """Ends the browser; its processes have ended when it has."""
        self._session = None
        self.call("Browser.close")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its own files in this folder. Its pipe is at the descriptors 3 and 4, where it looks."""
    assert CHROMIUM, WITHOUT
    theirs_in, into = os.pipe()
    out, theirs_out = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _AT_3_AND_4,
            str(theirs_in),
            str(theirs_out),
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    RUNNING.add(process.pid)
    try:
        page = Browser(into, out)
        yield page
        page.close()
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        RUNNING.discard(process.pid)
        os.close(into)
        os.close(out)
