"""A server under load, decided without sockets: how large a batch is, what is refused, which connection goes."""

import asyncio
import json
import threading
from asyncio import CancelledError
from unittest.mock import Mock

import uvicorn
from uvicorn.server import ServerState

from sluice.dlrm.serving.batcher import BATCH_SIZE, INLINE_SIZE, Batcher
from sluice.dlrm.serving.connections import GuardedProtocol
from tests.dlrm.serving.stub import GOOD, POST
from tests.product import Refusal, ServerLimits


def test_what_waits_is_worked_on_together_within_the_limits_of_a_batch_and_of_the_queue():
    """A request is its size. A large one is worked on in another thread, and one that fails is the error of its batch
    alone."""
    batches: list[list[int]] = []
    loop_thread = threading.get_ident()

    def work(sizes: list[int]) -> list[bool]:
        batches.append(list(sizes))
        if -1 in sizes:
            raise RuntimeError("worker")
        return [threading.get_ident() == loop_thread] * len(sizes)

    async def run() -> bool:
        batcher = Batcher(work, waiting_limit=150, batch_limit=4)

        async def ask(size: int) -> bool:
            return await batcher.ask(size, size)

        assert await ask(100 * BATCH_SIZE) is False, "alone, any request has its try"
        assert await ask(INLINE_SIZE)
        asked = [asyncio.ensure_future(ask(size)) for size in (1, 2, 3, 4, 5, -1)]
        await asyncio.sleep(0)
        asked[2].cancel()  # its client went away
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(answer) for answer in answers] == [bool] * 2 + [
            CancelledError,
            bool,
            bool,
            RuntimeError,
        ]
        for size in (BATCH_SIZE // 2, 0):
            asked = [ask(size) for _ in range(200)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, Refusal)]
            assert len(refused) == 200 - (64 if size else 150)
            assert {(refusal.status, refusal.headers["retry-after"]) for refusal in refused} == {
                (503, "1")
            }
        return await ask(7)

    assert asyncio.run(asyncio.wait_for(run(), 60))
    assert batches[2:4] == [[1, 2, 4, 5], [-1]]
    assert batches[4:36] == [[BATCH_SIZE // 2] * 2] * 32
    assert batches[-1] == [7]


class Never:
    """An application that never answers."""

    def __init__(self, limit: int) -> None:
        self.limits = ServerLimits(timeout=60.0, max_connections=limit)

    async def __call__(self, _scope: object, _receive: object, _send: object) -> None:
        await asyncio.Event().wait()


def connector(limit: int):
    """Connects to a server that never answers. Each connection comes with a transport that keeps what is written."""
    config = uvicorn.Config(Never(limit), loop="asyncio", log_config=None, proxy_headers=False)
    config.load()
    state = ServerState()

    def connect():
        connection, transport = GuardedProtocol(config, state, {}), Mock()
        transport.is_closing.side_effect = lambda: transport.close.called
        connection.connection_made(transport)
        return connection, transport

    return connect


DOUBTFUL = {
    "both lengths": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 30\r\n\r\n{}",
    "bare line feeds": GOOD.replace(b"\r\n", b"\n"),
    "a folded header": POST + b"x: y\r\n content-length: 30\r\ncontent-length: 2\r\n\r\n{}",
    "a blank before the colon": POST + b"content-length : 2\r\n\r\n{}",
    "an empty chunk size": POST + b"transfer-encoding: chunked\r\n\r\n\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than it says": POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
    "chunked twice": POST
    + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a head without an end": GOOD[:-2] + b"x: " + b"y" * 66_000,
    "headers without an end": GOOD[:-2] + b"x: y\r\n" * 11_000,
    "headers after the body, without an end": POST
    + b"transfer-encoding: chunked\r\n\r\n0\r\n"
    + b"x: y\r\n" * 11_000,
    "a crowd on one connection": GOOD * 40,
    "no host": GOOD.replace(b"host: x\r\n", b""),
    "two hosts": GOOD.replace(b"host", b"host: y\r\nhost"),
}


def test_doubtful_requests_are_refused_and_what_is_smuggled_behind_them_is_not_answered():
    async def run() -> None:
        connect = connector(99)
        for name, sent in DOUBTFUL.items():
            connection, transport = connect()
            connection.data_received(sent if "without an end" in name else sent + GOOD)
            await asyncio.sleep(0)
            heard = b"".join(call.args[0] for call in transport.write.call_args_list)
            assert heard.startswith(b"HTTP/1.1 400 Bad Request\r\n"), name
            assert (heard.count(b"HTTP/1.1 "), b"connection: close" in heard) == (1, True), name
            assert "HTTP" in json.loads(heard.partition(b"\r\n\r\n")[2])["error"], name
            assert transport.close.called, name

    asyncio.run(run())


def test_a_connection_too_many_is_refused_until_another_one_is_closed():
    async def run() -> None:
        connect = connector(2)
        (first, _), _ = connect(), connect()
        connection, transport = connect()
        await asyncio.sleep(0)
        assert transport.close.called
        assert b"503 Service Unavailable" in transport.write.call_args.args[0]
        assert b"retry-after: 1" in transport.write.call_args.args[0]
        for gone in (connection, first):
            gone.connection_lost(None)
        assert not connect()[1].close.called

    asyncio.run(run())
