"""A server under load, decided without sockets: how large a batch is, what is refused, which connection goes."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import uvicorn
from uvicorn.server import ServerState

from sluice.dlrm.serving.batcher import BATCH_SIZE, INLINE_SIZE, Batcher
from sluice.dlrm.serving.connections import protocol
from sluice.dlrm.serving.decode import Refusal

HEAD = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"


def test_batches_and_the_queue_are_bounded_by_the_work_and_large_batches_leave_the_loop():
    batches: list[int] = []
    loop_thread = threading.get_ident()

    def work(sizes: list[int]) -> list[bool]:
        batches.append(sum(sizes))
        return [threading.get_ident() == loop_thread] * len(sizes)

    async def run() -> list[object]:
        batcher: Batcher[int, bool] = Batcher(work, size=lambda size: size, waiting_limit=10**6)
        assert await batcher.ask(100 * BATCH_SIZE) is False, "alone, any request has its try"
        for size in (INLINE_SIZE, INLINE_SIZE + 1):
            assert await batcher.ask(size) is (size == INLINE_SIZE)
        found = [
            await asyncio.gather(
                *(batcher.ask(BATCH_SIZE // 4) for _ in range(200)), return_exceptions=True
            )
            for _ in range(2)
        ]
        return [one for part in found for one in part]

    found = asyncio.run(run())
    refused = [one for one in found if isinstance(one, Refusal)]
    assert len(refused) == 2 * (200 - 4 * 32), "and what was refused leaves no trace"
    assert {(one.status, one.headers["retry-after"]) for one in refused} == {(503, "1")}
    assert batches[3:] == [BATCH_SIZE] * 64


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
