"""Mutates every field of the messages between a loader and its worker processes and remote workers, and reads them.

It is a program of its own, because a message that is believed too far ends the process that reads it. The last line of
its output has the number of messages in each direction, and of those that were refused."""

import copy
import json
import random
import socket
import sys
import threading
from collections import Counter

import numpy as np
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.ingest.process import child_main, protocol
from sluice.ingest.remote import messages
from sluice.ingest.remote.calls import request_call
from sluice.ingest.remote.messages import RemoteError, WrongAnswer, decode, encode
from tests.ingest.remote import functions
from tests.product import (
    FunctionError,
    Functions,
    Permission,
    SharedMemoryError,
    UsageError,
    WorkerCrashed,
    WorkerProcess,
)

NAME = "tests.ingest.remote.functions:halved"
ARRAYS = {
    "I1": np.linspace(0.5, 7, 12, dtype=np.float32),
    "C1": np.arange(12, dtype=np.int32).reshape(3, 4),
    "none": np.empty(0, np.int64),
}
HOSTILE = [
    *(None, True, -1, -64, 0, 1, 64, 0.5, float("nan"), 2**31, 2**47, 2**63, 10**400),
    *("", "O", "|O", "T", "|T16", "i4,O", "<i9", "|V9999999", "|b1", "<f4[s]", "a" * 70, NAME),
    *([], {}, [[]], [-1], [2**40, 2**40], [0] * 40, ["MemoryError", []], {"kinds": 1}),
]
REFUSED = (
    protocol.InvalidMessage,
    FunctionError,
    WorkerCrashed,
    SharedMemoryError,
    WrongAnswer,
    RemoteError,
    UsageError,
)


def paths(tree, at=()):
    """Every field of a message, by its path."""
    yield at
    fields = enumerate(tree) if isinstance(tree, list) else getattr(tree, "items", tuple)()
    for key, value in fields:
        yield from paths(value, (*at, key))


def mutations(tree, draw):
    """Copies of a message in each of which one field is another value, a drawn number, missing or there twice."""
    for path in paths(tree):
        drawn = [64 * draw.randrange(-(2**20), 2**20), draw.randrange(-(2**70), 2**70)]
        for value in (*HOSTILE, *drawn, "missing", "twice"):
            mutated = {"all": copy.deepcopy(tree)}
            *ways, last = ("all", *path)
            place = mutated
            for way in ways:
                place = place[way]
            if value == "missing":
                del place[last]
            elif value == "twice":
                place[last] = [place[last]] * 2
            else:
                place[last] = value
            yield mutated.get("all")


def touch(arrays):
    """Reads each value, as the loader and users' functions do."""
    for array in arrays.values():
        assert not array.dtype.hasobject, f"{array.dtype} would be read as addresses"
        array.tobytes(), repr(array), np.array(array).argsort(axis=None, kind="stable")


def body_of(frame, region, index):
    """A remote call or its answer, with the checksum that it should have."""
    data = np.frombuffer(bytes(region) + json.dumps(index).encode(), np.uint8)
    if isinstance(frame, dict):
        frame = {"index": [len(region), data.size], "sum": crc32(data.data), **frame}
    end = json.dumps(frame).encode()
    return pa.py_buffer(data.tobytes() + end + len(end).to_bytes(4, "little"))


def remote_bodies(body, draw):
    """A call or answer with one field mutated: of its frame, and of the index of its arrays."""
    data = body.to_pybytes()
    size = len(data) - 4 - int.from_bytes(data[-4:], "little")
    frame = json.loads(data[size:-4])
    start, end = frame.pop("index")
    del frame["sum"]
    region, index = data[:start], json.loads(data[start:end])
    for mutated in mutations(index, draw):
        yield body_of(frame, region, mutated)
    for mutated in mutations(frame, draw):
        yield body_of(mutated, region, index)
    for mutated in mutations([start, end], draw):
        yield body_of(frame | {"index": mutated}, region, index)


def read_remote(draw):
    """Yields the direction of each call and answer, and what reads it."""
    known = Functions(Permission(functions=frozenset([NAME])))
    call = request_call(NAME, ARRAYS, "step 7")
    answer = messages.answer(call.body, known.call)
    head = decode(answer)[0]
    raised = encode({**head, "error": protocol.describe(ValueError("x"))}, {})
    failed = encode({**head, "failed": ["source", "no such file"]}, {})

    def answered(body):
        return call.result(*messages.read_answer(body, call.body))

    def asked(body):
        return messages.read_answer(messages.answer(body, known.call), body)[1]

    for body in remote_bodies(call.body, draw):
        yield "to a worker", lambda body=body: touch(asked(body))
    for sent in (answer, raised, failed):
        for body in remote_bodies(sent, draw):
            yield "from a worker", lambda body=body: touch(answered(body))


class MutatedChild:
    """Stands for a worker's process, and gives one answer."""

    def __init__(self, reply):
        self.receive = lambda _limit_s: reply
        self.process = type("Process", (), {"pid": None})

    def send(self, message):
        pass

    def trace(self):
        return ""

    def close(self):
        pass


def read_process(draw):
    """Yields the same for worker processes. The index lies in the region, and its positions in the message."""
    with WorkerProcess(NAME, deaths=1) as worker:
        layout = protocol.RegionLayout(ARRAYS)
        worker._region.reserve(2**16)
        start, end = layout.write(worker._region.bytes())
        index = json.loads(worker._region.bytes()[start:end].tobytes())
        size = worker._region.size

        def put(mutated):
            text = json.dumps(mutated).encode()
            worker._region.bytes()[2**15 : 2**15 + len(text)] = np.frombuffer(text, np.uint8)
            return [2**15, 2**15 + len(text)]

        def answer(reply):
            worker._child = MutatedChild(reply)
            touch(worker.call(ARRAYS))

        def reread(mutated):
            worker._child = MutatedChild({})
            worker._child.receive = lambda _limit_s: {"index": put(mutated)}
            touch(worker.call(ARRAYS))

        for mutated in mutations(index, draw):
            yield "from a process", lambda mutated=mutated: reread(mutated)
        for reply in (
            {"index": [start, end]},
            {"refused": [size, "no memory"]},
            {"error": protocol.describe(MemoryError("x"))},
        ):
            for mutated in mutations(reply, draw):
                if isinstance(mutated, dict):  # `receive` refuses the others
                    yield "from a process", lambda mutated=mutated: answer(mutated)

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(
            target=child_main.serve, args=(theirs, functions.halved, worker._region.fd), daemon=True
        ).start()
        protocol.receive(ours)

        def ask(message):
            protocol.send(ours, message)
            reply = protocol.receive(ours)
            if "error" in reply:
                raise FunctionError("a process", reply["error"])

        def ask_with(mutated):
            layout.write(worker._region.bytes())
            ask({"region": [size, put(mutated)]})

        for mutated in mutations(index, draw):
            yield "to a process", lambda mutated=mutated: ask_with(mutated)
        for mutated in mutations({"region": [size, [start, end]]}, draw):
            if isinstance(mutated, dict):
                yield "to a process", lambda mutated=mutated: ask(mutated)


def main(seed):
    draw, counts, refused, wrong = random.Random(seed), Counter(), Counter(), []
    for direction in (read_remote, read_process):
        for way, read in direction(draw):
            counts[way] += 1
            try:
                read()
            except REFUSED as error:
                refused[way] += bool(str(error).strip())
            except Exception as error:
                wrong.append(f"{way}: {type(error).__name__}: {error}"[:300])
    print(json.dumps({"counts": counts, "refused": refused, "wrong": wrong[:20]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
