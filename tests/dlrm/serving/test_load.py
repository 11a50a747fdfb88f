"""A server under load, decided without sockets: how large a batch is, what is refused, which connection goes."""

from __future__ import annotations

import asyncio
import threading
from asyncio import CancelledError
from unittest.mock import Mock

import uvicorn
from uvicorn.server import ServerState

from sluice.dlrm.serving.batcher import BATCH_SIZE, INLINE_SIZE, Batcher
from sluice.dlrm.serving.connections import protocol
from sluice.dlrm.serving.decode import Refusal

HEAD = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"


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
        batcher: Batcher[int, bool] = Batcher(
            work, size=lambda size: size, waiting_limit=150, batch_limit=4
        )
        assert await batcher.ask(100 * BATCH_SIZE) is False, "alone, any request has its try"
        assert await batcher.ask(INLINE_SIZE)
        asked = [asyncio.ensure_future(batcher.ask(size)) for size in (1, 2, 3, 4, 5, -1)]
        await asyncio.sleep(0)
        asked[2].cancel()  # its client went away
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in found] == [bool] * 2 + [
            CancelledError,
            bool,
            bool,
            RuntimeError,
        ]
        for size in (BATCH_SIZE // 2, 0):
            asked = [batcher.ask(size) for _ in range(200)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [one for one in found if isinstance(one, Refusal)]
            assert len(refused) == 200 - (64 if size else 150)
            assert {(one.status, one.headers["retry-after"]) for one in refused} == {(503, "1")}
        return await batcher.ask(7)

    assert asyncio.run(run())
    assert batches[2:4] == [[1, 2, 4, 5], [-1]]
    assert batches[4:36] == [[BATCH_SIZE // 2] * 2] * 32
    assert batches[-1] == [7]


def test_the_longest_idle_connection_goes_and_never_one_with_a_request_under_way():
    async def run() -> None:
        kind = protocol(60.0, 3)
        config = uvicorn.Config(Mock(), loop="asyncio", log_config=None)
        config.load()
        state = ServerState()

        def connect():
            new = kind(config, state, {})
            transport = Mock()
            transport.is_closing.side_effect = lambda: transport.close.called
            new.connection_made(transport)
            return new, transport

        def is_closed(connection) -> bool:
            return connection[1].close.called

        first, *others = (connect() for _ in range(3))
        first[0].data_received(HEAD)
        fourth = connect()
        assert [is_closed(one) for one in (first, *others, fourth)] == [False, True, False, False]
        others[0][0].connection_lost(None)
        for one in (others[1], fourth):
            one[0].data_received(HEAD)
        assert is_closed(connect()), "all others are at work: the new one is sent away"
        for one in (first, others[1], fourth):
            assert not is_closed(one)
            one[0].connection_lost(None)

    asyncio.run(run())
