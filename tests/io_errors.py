"""Calls of the system that fail with EIO, as on a disk that dies: in one thread, and in those that it starts.

The kernel itself fails them, by a filter of the thread (seccomp), so Arrow's C++ and Python's own files are struck
alike."""

import ctypes
import errno
import platform
import struct
import threading
from collections.abc import Callable
from typing import Any

NUMBERS = {
    "read": 0,
    "write": 1,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "fsync": 74,
    "fdatasync": 75,
    "rename": 82,
    "preadv2": 327,
    "renameat": 264,
    "renameat2": 316,
    "link": 86,
    "linkat": 265,
}
BY_DESCRIPTOR = {"read", "write", "pread64", "pwrite64", "readv", "writev", "preadv2"}
is_known = platform.machine() == "x86_64"
_LOAD, _EQUAL, _GREATER, _RETURN = 0x20, 0x15, 0x25, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EIO


def fail_from_now_on(*calls: str) -> None:
    """These calls of this thread fail from now on; those by a descriptor only above 2."""
    steps: list[tuple[int, int, int, int]] = [(_LOAD, 0, 0, 0)]
    for call in calls:
        if call in BY_DESCRIPTOR:  # look at the first argument, then at the call's number again
            steps += [
                (_EQUAL, 0, 3, NUMBERS[call]),
                (_LOAD, 0, 0, 16),
                (_GREATER, 0, 1, 2),
                (_RETURN, 0, 0, _FAIL),
                (_LOAD, 0, 0, 0),
            ]
        else:
            steps += [(_EQUAL, 0, 1, NUMBERS[call]), (_RETURN, 0, 0, _FAIL)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(
        22, 2, program, 0, 0
    ):  # no new privileges; then the filter
        raise OSError(ctypes.get_errno(), "no filter can be set here")


def struck(action: Callable[[], Any], *calls: str) -> Any:
    """What an action returns, or the exception that it raises, in a thread whose calls fail."""
    outcomes: list[Any] = []

    def run() -> None:
        fail_from_now_on(*calls)
        try:
            outcomes.append(action())
        except Exception as error:
            outcomes.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcomes[0]
