"""The page of a run while it grows: what it answers, whom it refuses, and that it ends with its run."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sluice.agent.__main__ import LiveOptions
from sluice.agent.report import live, page
from sluice.agent.report.live import LivePages, LiveRun
from sluice.agent.report.live_server import LiveError, listening, shown
from sluice.agent.report.run_folder import Run, RunFolder
from sluice.common.settings import parse
from tests.raises import raises


def _line(rate):
    return {
        "kind": "loader",
        "rows": 0,
        "rows_per_s": rate,
        "stall": 0.1,
        "memory_used": 1,
        "memory_limit": 2,
        "cpu": 1.0,
        "cpu_quota": 2.0,
        "knobs": {"workers": {"read": 1}},
        "stages": {},
    }


@contextmanager
def _run(path, lines=3):
    with RunFolder.create(path, {"kind": "bench"}) as folder:
        for number in range(lines):
            folder.metric(_line(1000.0 + number))
        yield folder


@contextmanager
def _served(*runs):
    with LivePages(listening(0), [Path(run) for run in runs]) as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        try:
            yield pages
        finally:
            pages.over.set()
            pages.shutdown()
            thread.join()


def _get(pages, path, host=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", pages.server_address[1], timeout=60)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_is_that_of_the_report_and_follows_the_run(tmp_path):
    with _run(tmp_path / "run") as folder, _served(tmp_path / "run") as pages:
        status, text = _get(pages, "/")
        assert status == 200
        report = page.write(tmp_path / "run").read_text()
        script = text[text.rindex("<script>") : text.index("</head>")]
        assert text.replace(script, "") == report
        assert "3 measurements" in text
        folder.metric(_line(5.0))
        assert "4 measurements" in LiveRun(tmp_path / "run").page()


@pytest.mark.parametrize("runs", [["run"], ["other", "run"]])
def test_a_browser_hears_when_a_run_has_written_something(tmp_path, runs):
    with _run(tmp_path / "run") as folder, _served(*(tmp_path / name for name in runs)) as pages:
        assert "EventSource" in _get(pages, "/")[1]
        connection = http.client.HTTPConnection("127.0.0.1", pages.server_address[1], timeout=60)
        connection.request("GET", "/changes")
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream"
        folder.metric(_line(5.0))
        lines = iter(answer.readline, b"")
        assert next(line for line in lines if line.startswith(b"data")) == b"data: changed\n"
        pages.over.set()
        assert next(line for line in lines if line.startswith(b"data")), "once more, at the end"
        assert not [line for line in lines if line.strip()], "then nothing"
        connection.close()


def test_a_page_that_takes_long_is_made_at_most_a_tenth_of_the_time(tmp_path, monkeypatch):
    now, made = [0.0], []

    def slow(run):
        made.append(now[0])
        now[0] += 2.0
        return "<html></head></html>"

    monkeypatch.setattr(page, "page", slow)
    with _run(tmp_path / "run") as folder:
        one = LiveRun(tmp_path / "run", clock=lambda: now[0])
        for now[0] in (0.0, 5.0, 10.0, 19.0, 20.0, 21.0):
            folder.metric(_line(1.0))
            one.page()
        one.page()
    assert made == [0.0, 20.0]


def test_several_runs_are_listed_with_their_verdicts(tmp_path):
    with (
        _run(tmp_path / "first") as _,
        _run(tmp_path / "second"),
        _served(tmp_path / "first", tmp_path / "second", tmp_path / "later") as pages,
    ):
        text = _get(pages, "/")[1]
        assert 'href="1/"' in text
        assert str(tmp_path / "second") in text
        assert "no run" in text or "config.json" in text
        assert "3 measurements" in _get(pages, "/2/")[1]
        assert "is being prepared" in _get(pages, "/3/")[1]
        for path in ("/4/", "/1", "/1/../../etc/passwd", "/1/config.json"):
            assert _get(pages, path)[0] == 404, path


def test_a_run_of_the_list_is_read_again_only_when_it_has_grown(tmp_path, monkeypatch):
    read, now = [], [0.0]
    monkeypatch.setattr(
        live, "Run", SimpleNamespace(read=lambda path: read.append(path.name) or Run.read(path))
    )
    with (
        _run(tmp_path / "first") as first,
        _run(tmp_path / "second"),
        _served(tmp_path / "first", tmp_path / "second") as pages,
    ):
        pages.runs = {
            number: LiveRun(run.path, clock=lambda: now[0]) for number, run in pages.runs.items()
        }
        _get(pages, "/")
        _get(pages, "/")
        assert read == ["first", "second"]
        first.metric(_line(5.0))
        _get(pages, "/")
        assert read == ["first", "second", "first"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example:1", 403),
    ],
)
def test_only_this_machine_by_its_own_name_is_answered(tmp_path, host, status):
    with _run(tmp_path / "run"), _served(tmp_path / "run") as pages:
        assert pages.server_address[0] == "127.0.0.1"
        assert _get(pages, "/", host.format(port=pages.server_address[1]))[0] == status
        assert _get(pages, "/", method="POST")[0] == 501


def test_a_page_that_cannot_be_shown_is_refused_before_the_run_begins(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(LiveError, match=f"--live {port}.* not available .*choose another, or 0"),
            shown(tmp_path, port, print),
        ):
            pass
    with (
        pytest.raises(LiveError, match="no run folder to show; name one with --run-dir"),
        shown("", 0, print),
    ):
        pass
    with raises(LiveError, 70000), shown(tmp_path, 70000, print):
        pass


def test_the_page_of_a_run_ends_with_it(tmp_path):
    said = []
    with _run(tmp_path / "run"), shown(tmp_path / "run", 0, said.append):
        port = int(said[0].partition("127.0.0.1:")[2].partition("/")[0])
        (child,) = psutil.Process().children()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/")
        assert b"3 measurements" in connection.getresponse().read()
        connection.close()
        os.kill(child.pid, signal.SIGWINCH)  # a terminal's signals are not its own
    assert not child.is_running()


def test_the_verb_serves_until_an_interrupt(tmp_path):
    with _run(tmp_path / "run"):
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice", "live", tmp_path / "run", "--port", "0"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process.stderr as lines, process.stdout:
            line = next(lines)
            port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/")
            assert b"3 measurements" in connection.getresponse().read()
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    result = subprocess.run(
        [sys.executable, "-m", "sluice", "live", tmp_path / "none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "none" in result.stderr


def test_nothing_of_the_server_is_loaded_by_a_run():
    code = "import sys, sluice.loader; print('sluice.agent.report.live' in sys.modules, 'http.server' in sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert loaded.split() == ["False", "False"]


def test_several_runs_are_named_one_after_the_other():
    assert parse(LiveOptions, argv=["one", "two"], prog="sluice live").runs == ("one", "two")
