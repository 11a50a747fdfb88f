"""How every program begins and ends. Its last line on standard output is one JSON object, and text for people goes to
standard error. Exit codes: 0 done, 1 failed, 2 wrong usage or input, 130 interrupted, 143 preempted and saved. Only
programs import this file.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import inspect
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sluice.common.errors import Preempted, RunFailure, UsageError, without_keys
from sluice.common.extras import advice
from sluice.common.lines import JsonLines, say
from sluice.common.settings import LOG_FORMATS
from sluice.common.suggest import left, nearest

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130
PREEMPTED = 143
_GRACE_S = 1.5  # an interrupt is answered within two seconds, whatever still hangs
_NAMES = sys.getfilesystemencoding()
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def command_of(argv: Sequence[str], known: Collection[str], usage: str) -> str | None:
    """Returns the command that a command line begins with. Without one, or with --help, prints the usage and returns
    None. Raises UsageError for an unknown command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return None
    if argv[0] not in known:
        raise UsageError(f"no command {argv[0]!r}{left(argv[0]) or nearest(argv[0], known)}")
    return argv[0]


def run(
    main: Callable[[list[str]], Mapping[str, Any] | None],
    *,
    argv: list[str] | None = None,
    at_once: bool = False,
) -> NoReturn:
    """Runs `main(argv)`, prints its result as the last line, and exits as this module's docstring says.

    A `UsageError` means wrong usage or input. The message of a `RunFailure` is enough without a traceback. `at_once`
    skips the interpreter's tear-down, in which a library's native threads may abort a finished run.
    """
    code: Any
    try:
        code = _run(main, sys.argv[1:] if argv is None else argv)
    except SystemExit as end:
        code = end.code or DONE
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        if isinstance(sys.stderr, JsonLines):
            sys.stderr.finish()
        sys.stderr.flush()
    if at_once:
        os._exit(code if isinstance(code, int) else FAILED)
    gc.freeze()  # Otherwise Python looks through all objects once more, which takes two seconds after torch.
    raise SystemExit(code)


def take_log_format(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Returns what --log-format says, and the other words of a command line."""
    until = list(argv).index("--") if "--" in argv else len(argv)
    chosen, words = "text", iter(argv[:until])
    others = []
    for word in words:
        name, given, value = word.partition("=")
        if name != "--log-format":
            others.append(word)
            continue
        chosen = value if given else next(words, "")
        if chosen not in LOG_FORMATS:
            raise UsageError(f"--log-format: {chosen!r} is none of {', '.join(LOG_FORMATS)}")
    return chosen, [*others, *argv[until:]]


def _name(main: Callable[..., Any], argv: Sequence[str]) -> str:
    """Returns the name of a program's file, or its verb if the file has several."""
    name = Path(inspect.getfile(inspect.unwrap(main))).stem
    if name != "__main__":
        return name
    return argv[0] if argv and not argv[0].startswith("-") else "sluice"


def _run(main: Callable[[list[str]], Mapping[str, Any] | None], argv: list[str]) -> int:
    """Runs `main` and prints its result, or what went wrong. Returns the exit code."""
    program = _name(main, argv)
    try:
        for stream in (sys.stdout, sys.stderr):  # this program prints UTF-8 in every locale
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        log_format, argv = take_log_format(argv)
        if log_format == "json" and sys.stderr is not None:
            lines = JsonLines(sys.stderr, program)
            for name in ("stderr", "__stderr__"):
                setattr(sys, name, lines)
        for word in argv:  # Arrow and stores take all names for UTF-8
            word.encode("utf-8" if _NAMES == "utf-8" else "ascii")
        code = DONE
        with _interrupts_answered():
            try:
                result = main(argv)
            except Preempted as end:
                result, code = end.result, PREEMPTED
        if result is not None:
            print(without_keys(json.dumps(result, default=_plain)))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say("interrupted")
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    except BrokenPipeError:  # `| head` has read enough
        os._exit(FAILED)
    except Exception as error:
        text, code = _describe(error, program)
        say(text)
        return code


def _describe(error: Exception, program: str) -> tuple[str, int]:
    """Returns what to print about an error, and the exit code."""
    if isinstance(error, RunFailure):
        return f"failed: {error}", FAILED
    if missing := advice(error, program):
        return f"error: {missing}", USAGE
    if isinstance(error, UnicodeEncodeError) and error.encoding in ("ascii", "utf-8", _NAMES):
        return (
            f"error: {error.object!r}: this name is not UTF-8, or this locale ({_NAMES}) does not read it; set "
            "PYTHONUTF8=1, and rename the file if that does not help"
        ), USAGE
    if isinstance(error, UsageError):
        return f"error: {error}", USAGE
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return (
            f"failed: {error.filename or 'a file'}: cannot be written ({error.strerror}); make room there, then "
            "run it again"
        ), FAILED
    if isinstance(error, PermissionError) and error.filename:
        return (
            f"error: {error.filename}: {error.strerror}; let this user read and write it, or choose another"
        ), USAGE
    return f"{traceback.format_exc()}failed: {type(error).__name__}: {error}", FAILED


@contextlib.contextmanager
def _interrupts_answered() -> Iterator[None]:
    """Returns a context in which an interrupt raises KeyboardInterrupt. A moment later it ends the process, even if
    something still hangs. Python runs a signal's handler only when the main thread has returned from C. So a thread
    measures the moment."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    over = threading.Event()

    def count_the_moment() -> None:
        while signals := os.read(read, 64):
            if signal.SIGINT in signals and not over.wait(_GRACE_S):
                os._exit(INTERRUPTED)
        os.close(read)

    def interrupted(_signum: int, _frame: object) -> None:
        # A second interrupt does not wait.
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        # A part of the program may have all signals reported to itself.
        os.write(write, bytes([signal.SIGINT]))
        raise KeyboardInterrupt

    handled_before = signal.signal(signal.SIGINT, interrupted)
    reported_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=count_the_moment, name="sluice-interrupt", daemon=True).start()
    try:
        yield
    finally:
        # The handler is restored unless an interrupt came, so that no moment is counted.
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, handled_before)
            signal.set_wakeup_fd(reported_before)
            over.set()
            os.close(write)


def _plain(value: Any) -> Any:
    """Converts numpy's numbers and frozen mappings to types that JSON knows."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, tuple, frozenset)):
        return list(value)
    return str(value)
