"""The program of a worker process. It calls one user function on arrays in shared memory.

Besides the user's module, the only large package that it imports is numpy. `sluice.ingest.process.worker` is the
owner's side.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import mmap
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from faulthandler import enable as trace_faults
from faulthandler import register as trace_on
from typing import Any

import numpy as np

from sluice.ingest.process import protocol


def main(_owner: str, name: str, *descriptors: str) -> None:
    """Serves the function `name` until the owner closes its end. `_owner` is the owner's process id, which `owner_of`
    reads from the command line. The four descriptors are a socket, the lifeline, a file for stacks, and the region."""
    control, lifeline, trace, region = map(int, descriptors)
    end_with_parent(lifeline)
    trace_faults(trace)  # a segmentation fault also writes its stack there
    trace_on(signal.SIGUSR1, trace, chain=False)
    sock = socket.socket(fileno=control)
    try:
        try:
            function = load(name)
        except BaseException as error:
            protocol.send(sock, {"error": protocol.describe(error)})
            return
        serve(sock, function, region)
    except protocol.Gone:
        return


def serve(sock: socket.socket, function: Callable[..., Any], fd: int) -> None:
    """Calls the function on each item that comes in the region `fd`, and adds its result there."""

    @functools.lru_cache(maxsize=1)
    def mapped(size: int) -> protocol.Array:
        return np.frombuffer(mmap.mmap(fd, size), np.uint8)

    def call(size: int, index: list[int]) -> dict[str, Any]:
        columns, places = protocol.read(mapped(size), index)
        result = new_columns(function, columns)
        lying = {id(array): places[name] for name, array in columns.items()}
        layout = protocol.RegionLayout({**columns, **result}, index[1], lying)
        if layout.size > size:
            try:
                size = protocol.grow(fd, layout.size)
            except OSError as error:
                return {"refused": [layout.size, error.strerror]}
        return {"index": layout.write(mapped(size))}

    protocol.send(sock, {})
    while True:
        message = protocol.receive(sock)
        try:
            answer = call(*message["region"])
        except BaseException as error:  # sys.exit() in a user's function counts as an error too
            answer = {"error": protocol.describe(error)}
        protocol.send(sock, answer)


def load(name: str) -> Callable[..., Any]:
    """Imports the function `module:function`."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def new_columns(function: Callable[..., Any], columns: protocol.Columns) -> protocol.Columns:
    """Calls a user's function and returns the columns that it added or replaced."""
    result = protocol.call_function(function, dict(columns))
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise TypeError(
            f"the function returned {type(result).__name__}, not a dict of column names and arrays"
        )
    return {name: np.asarray(array) for name, array in result.items()}


def end_with_parent(lifeline: int) -> None:
    """Makes this process end when its parent dies.

    The parent holds the other end of this pipe and never writes. When it dies, the kernel sends SIGIO, which ends the
    process even inside a call that does not let the interpreter run. The signal goes to the worker's process group, so
    processes that the user's function started end too."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO, signal.SIGUSR1})
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # the parent died before the signal was set up
        os._exit(1)
