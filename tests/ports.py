"""Ports on which a test's program is to listen, where it cannot take whichever is free."""

import itertools
import os
import socket

_FIRST, _COUNT = 20_000, 12_000
"""Below those that the kernel gives to whoever connects, or listens on any."""
_numbers = itertools.count()


def free(count: int = 1) -> int:
    """The first of so many neighbours that are free. Where the search begins differs from process to process, so that
    two runs of tests side by side do not find the same ones. No call gets those of an earlier one, whose program may
    not listen yet."""
    for number in itertools.islice(_numbers, _COUNT // 16):
        first = _FIRST + (os.getpid() + 97 * number) * 16 % _COUNT
        taken = []
        try:
            for port in range(first, first + count):
                taken.append(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        finally:
            for listener in taken:
                listener.close()
        return first
    raise AssertionError(f"there are no {count} free ports side by side")
