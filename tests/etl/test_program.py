"""How programs end: seen from outside, as a shell sees it."""

import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sluice.common.program import run
from tests.product import UsageError
from tests.raises import MISTAKES, assert_names, raises
from tests.run_program import last_json, run_program

ROOT = Path(__file__).resolve().parents[2]
CRITEO = f"--spec {ROOT}/features/criteo.toml"
PRELUDE = (
    "\n".join(
        f"from sluice.common.{names}"
        for names in ("errors import UsageError", "lines import say", "program import run")
    )
    + "\n"
)


def ended(body: str) -> subprocess.CompletedProcess:
    return run_program("-c", PRELUDE + body)


@pytest.mark.parametrize(
    ("body", "code", "error"),
    [
        ("run(lambda argv: {'rows': 3})", 0, ""),
        (
            "def main(argv): raise UsageError('no file x.toml')\nrun(main)",
            2,
            "error: no file x.toml",
        ),
        (
            "import sluice.common.errors as e\ndef main(argv): raise e.RunFailure('k')\nrun(main)",
            1,
            "failed: k",
        ),
        ("def main(argv): raise OSError('disk full')\nrun(main)", 1, "failed: OSError: disk full"),
        (
            "def main(argv): raise PermissionError(13, 'No', 'a.csv')\nrun(main)",
            2,
            "error: a.csv: No",
        ),
        (
            "import argparse\nrun(lambda argv: argparse.ArgumentParser().parse_args(['--nope']))",
            2,
            "--nope",
        ),
    ],
)
def test_exit_codes_and_messages(body, code, error):
    result = ended(body)
    assert result.returncode == code, result.stderr
    assert error in result.stderr
    if code == 0:
        assert last_json(result) == {"rows": 3}
    else:
        assert result.stdout == ""


@pytest.mark.parametrize(
    "body",
    [
        "run(lambda argv: {'rows': 3})",
        "run(lambda argv: print('text'))",
        "run(lambda argv: print('text', flush=True))",
        "import sys; sys.argv[1:] = ['--help']; from sluice.__main__ import main; main()",
        "import sys; sys.argv[1:] = ['--version']; from sluice.__main__ import main; main()",
    ],
)
def test_who_reads_no_further_gets_no_traceback(body, repo):
    """As `| head` does it, which ends when it has read its lines."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        cwd=repo,
        check=False,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def refused(program, words, capsys) -> str:
    """The one line in which a program refuses its command line."""
    with pytest.raises((UsageError, SystemExit)) as ended:
        importlib.import_module(program).main(words.split())
    if isinstance(ended.value, UsageError):  # which the program's frame says in one line
        return str(ended.value)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "words", "meant"),
    MISTAKES["program"],
)
def test_every_program_says_which_option_may_have_been_meant(program, words, meant, capsys):
    assert_names(refused(program, words, capsys), f"'--{meant}'")


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("{}/no-such-*.tsv", "no file"),
        ("file://{}/no-such", "no file"),
        ("{}/here-*", ""),
        ("{}/no-{{such,other}}", "no file"),
        ("{}/other.csv", "'I1'"),
    ],
)
def test_input_that_is_missing_or_has_another_header_is_refused_before_spark_starts(
    tmp_path, monkeypatch, path, refused
):
    from sluice.common.errors import InputError
    from sluice.etl.job import main

    class Started(Exception):
        pass

    def start():
        raise Started

    monkeypatch.setattr("sluice.etl.spark.session.open_session", start)
    (tmp_path / "here-1").touch()
    (tmp_path / "other.csv").write_text("label,I2\n")
    spec = tmp_path / "spec.toml"
    head = 'format = "csv"\nheader = true' if path.endswith("csv") else 'format = "tsv"'
    spec.write_text((ROOT / "features/criteo.toml").read_text().replace('format = "tsv"', head))
    words = f"--spec {spec} --input {path.format(tmp_path)} --output {tmp_path}/t --engine spark"
    with raises(InputError if refused else Started, *filter(None, [refused])):
        main(words.split())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{CRITEO} --input no-such.tsv", "no file"),
        ("--spec features/sessions.toml --input sessions.json", "only Spark"),
        (f"{CRITEO} --input log", "holds no rows"),
    ],
)
def test_a_refused_job_leaves_no_folder(tmp_path, words, why):
    from sluice.common.errors import UsageError
    from sluice.etl.job import main

    for name in ("log", "sessions.json"):
        (tmp_path / name).touch()
    words = words.replace("--input ", f"--input {tmp_path}/")
    with raises(UsageError, why):
        main([*words.split(), "--engine", "local", "--output", f"{tmp_path}/new/table"])
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    from sluice.etl.table.store import StoreError, TableStore

    (tmp_path / "file").touch()
    with raises(StoreError, "file/table: cannot be written", "Not a directory"):
        TableStore(tmp_path / "file/table").probe()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with raises(StoreError, "link: cannot be written"):
        TableStore(tmp_path / "link").probe()


def interrupted(body: str) -> subprocess.CompletedProcess:
    """How a program of that body ends, which interrupts itself."""
    head = "import hashlib, os, signal, threading\nwait = threading.Event().wait\n"
    head += "def interrupt(): os.kill(os.getpid(), signal.SIGINT)\ndef main(argv):"
    result = ended(f"{head}{body}run(main)\n")
    assert result.returncode == 130
    return result


def test_an_interrupt_ends_with_130_even_where_a_thread_hangs():
    body = """
    threading.Thread(target=wait).start()  # never ends, and is no daemon
    interrupt()
    wait()
"""
    assert "interrupted" in interrupted(body).stderr


def test_an_interrupt_is_answered_while_the_main_thread_is_in_c():
    """It is in C for many minutes, and Python runs no handler of a signal meanwhile."""
    body = """
    begun = threading.Event()
    threading.Thread(target=lambda: begun.wait() and interrupt()).start()
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    interrupted(body)


def test_an_interrupt_is_answered_by_code_that_swallows_it_and_has_signals_reported_to_itself():
    body = """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    while True:
        try:
            interrupt()
            wait()
        except KeyboardInterrupt:
            wait()
"""
    interrupted(body)


def test_a_moment_that_is_given_to_an_interrupt_is_less_than_two_seconds():
    """By what the program waits for, and not by a clock, which runs on while a busy machine does other things."""
    body = """
import os, signal, threading
from sluice.common import program
class Noted(threading.Event):
    def wait(self, timeout=None):
        print(timeout, flush=True)
program.threading = type("threading", (), {**vars(threading), "Event": Noted})
def main(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()
    except KeyboardInterrupt:
        threading.Event().wait()
run(main)
"""
    done = ended(body)
    assert done.returncode == 130
    assert 0 < float(done.stdout) < 2


def test_a_program_leaves_the_signals_of_its_process_as_they_were(tmp_path, capsys):
    handler, threads = signal.getsignal(signal.SIGINT), set(threading.enumerate())
    reported = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(reported)
    with pytest.raises(SystemExit):
        run(lambda argv: {"rows": 3}, argv=[])
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.set_wakeup_fd(reported) == reported
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_program_may_leave_at_once_with_its_line_and_its_code():
    """What would happen in the interpreter's tear-down does not: an abort there would spoil a run that is over."""
    body = """
import atexit, os, sys
atexit.register(os.abort)
def main(argv): return {"rows": 3} if argv else sys.exit(2)
run(main, argv=%s, at_once=True)
"""
    done = ended(body % "['x']")
    assert (done.returncode, done.stdout) == (0, '{"rows": 3}\n')
    assert ended(body % "[]").returncode == 2
