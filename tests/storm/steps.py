"""Where a storm interrupts what works on a table: before and after every call of its `Store`, and of delta-rs.

The calls themselves are the real ones, on real files. A call may fail as a full disk does, and whoever makes it may be
killed there."""

import errno
import functools
from collections.abc import Callable
from typing import Any

from deltalake import DeltaTable

from tests.storm.threads import Time, current, running

OF_STORE = (
    "read",
    "write",
    "remove",
    "files",
    "listed",
    "size",
    "modified",
    "remove_if_empty",
    "digest",
)
_WRITING = ("write", "create", "commit")


def step(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the store at which others go on."""

    @functools.wraps(call)
    def stepping(*arguments: Any, **named: Any) -> Any:
        if not running():
            return call(*arguments, **named)
        run = current()
        run.point(name)
        world = run.world
        if name in _WRITING:
            world.before_writing()
        if name == "modified":
            return world.modified.get(arguments[1], Time.time())
        result = call(*arguments, **named)
        if name == "write":
            world.modified[arguments[1]] = Time.time()
        run.point(f"after {name}")
        return result

    return stepping


class StepTable(DeltaTable):
    """delta-rs's table."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        if running():
            current().point("open")
        super().__init__(*arguments, **named)
        if running():
            current().point("opened")

    def create_write_transaction(self, *arguments: Any, **named: Any) -> None:
        step("commit", super().create_write_transaction)(*arguments, **named)


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
