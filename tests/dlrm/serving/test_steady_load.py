"""The steady load of `benchmarks/serving.py`, against a server that answers at once."""

from __future__ import annotations

import asyncio

from benchmarks.serving import own_p99_ms, requests, steady

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await reader.readline():
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            if line.startswith(b"content-length:"):
                length = int(line.split()[1])
        await reader.readexactly(length)
        assert head.startswith(b"POST")
        writer.write(ANSWER)
    writer.close()
    await writer.wait_closed()


def test_every_request_is_asked_once_and_not_before_it_is_due():
    looks: list[int] = []

    async def asked() -> list[float]:
        answering: list[asyncio.Task[None]] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answering.append(asyncio.ensure_future(answer(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            seen = await steady(
                port,
                requests([{"I1": 1}, {}], 1),
                clients=3,
                seconds=0.2,
                rate=200,
                look=lambda: looks.append(1),
            )
            await asyncio.gather(*answering)
        assert not seen.errors
        return seen.seconds

    seconds = asyncio.run(asked())
    assert len(seconds) == 40
    assert min(seconds) >= 0
    assert looks == [1]


def test_the_servers_own_percentile_is_the_bound_that_holds_it():
    inf = float("inf")
    before = {0.01: 5.0, 0.02: 5.0, 0.05: 5.0, inf: 6.0}
    after = {0.01: 100.0, 0.02: 104.5, 0.05: 105.0, inf: 106.0}
    assert own_p99_ms(before, after) == 20.0
