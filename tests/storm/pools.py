"""One run of a chain of pools alone in a storm: no tables, so that a thousand take a few seconds, and nothing else that
would bring a lost wake-up to light again: here no wait ends by its timeout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from sluice.ingest.errors import Closed
from sluice.ingest.memory.governor import Charge, Governor
from sluice.ingest.stages.counters import StageCounters
from sluice.ingest.stages.pool import Gatherer, Pool
from tests.storm.scheduler import Crew, Deviation, Ended, Scheduler, Way
from tests.storm.threads import Thread, Time, entered


class Wrong(Exception):
    """An item that fails on purpose."""


@dataclass(frozen=True)
class Chain:
    """What a seed draws."""

    items: int
    stages: int
    sizes: tuple[int, ...]
    """What each item is reserved."""
    grown: tuple[int, ...]
    """What it turns out to take."""
    room: int
    """Bytes of the limit above the minimum."""
    fails: tuple[int, int] | None
    """Stage and item that fail; stage -1: the input does."""
    turns: int
    close_after: int | None
    pieces: int
    """In how many pieces each item comes, which a stage before the others puts together. 0: there is no such stage."""
    between: tuple[bool, ...]
    """Whether a generator stands before a stage, as the one does that reads row groups."""

    @classmethod
    def draw(cls, chance: Random) -> Chain:
        items, stages = chance.randint(1, 16), chance.randint(1, 3)
        sizes = tuple(chance.randint(1, 6) for _ in range(items))
        fails = (
            (chance.randint(-1, stages - 1), chance.randrange(items))
            if chance.random() < 0.15
            else None
        )
        grown = tuple(chance.choice((s, s, 2 * s)) for s in sizes)
        return cls(
            items=items,
            stages=stages,
            sizes=sizes,
            grown=grown if items % 2 else sizes,
            room=chance.choice((0, 3, 20, 10**6)),
            fails=fails,
            turns=chance.choice((0, 2, 8)),
            close_after=chance.randrange(items) if chance.random() < 0.08 else None,
            pieces=chance.randrange(4),
            between=tuple(chance.random() < 0.3 for _ in range(stages)),
        )


Bend = Callable[[Chain], Chain]


class Item:
    """A number on its way, with the memory that it holds."""

    def __init__(self, number: int, charge: Charge | None):
        self.number, self.charge = number, charge


def run_pools(
    chance: Random, crew: Crew, traced: Any, bend: Bend = lambda chain: chain
) -> Scheduler:
    """One run; raises what it finds. `bend` changes what is drawn."""
    chain = bend(Chain.draw(chance))
    run = Scheduler(chance, Way.draw(chance, patient=True), crew, traced)
    run.case = chain
    with entered(run):
        try:
            _Run(chain, run).go()
        except Ended:
            raise run.failure or Deviation("the run was ended") from None
        run.finish()
    return run


class _Run:
    def __init__(self, chain: Chain, run: Scheduler):
        self._chain, self._run = chain, run
        most = (
            2 * max(chain.sizes) * 2 * chain.stages
        )  # of each stage one in work, and one that the next has taken
        if chain.pieces:
            most += 4 * max(chain.sizes) + 2 * chain.pieces + 2
        self._governor = Governor((most + chain.room) * 17 // 16 + 1, most)
        self._done = [[0] * chain.items for _ in range(chain.stages)]
        self._taken = 0
        upstream: Any = self._input()
        self._pools: list[Pool] = []
        if chain.pieces:
            upstream = self._gather(upstream)
            self._pools.append(upstream)
        for stage in range(chain.stages):
            if chain.between[stage]:
                upstream = (item for item in upstream)
            upstream = Pool(
                StageCounters(f"stage{stage}"),
                upstream,
                lambda stage=stage: self._work(stage),
                workers=run.chance.randint(1, 3),
                limit_bytes=run.chance.choice((1, 5, 100)),
                governor=self._governor,
                size=lambda item: chain.sizes[item.number],
                measure=lambda item: (1, chain.grown[item.number]),
            )
            self._pools.append(upstream)

    def go(self) -> None:
        agent = Thread(target=self._turn, name="agent")
        agent.start()
        closer = Thread(target=self._close, name="closer")
        closer.start()
        chain, got = self._chain, []
        try:
            for item in self._pools[-1]:
                got.append(item.number)
                if self._run.chance.random() < 0.3:
                    Time.sleep(0.01)
                if item.charge is not None:
                    item.charge.release()
                self._taken = len(got)
            if chain.fails is not None and chain.fails[1] % 3:
                raise Deviation(f"{chain.fails} did not fail")
        except Wrong:
            if chain.fails is None or got != list(range(chain.fails[1])):
                raise Deviation(f"an error behind {got}, where {chain.fails} fails") from None
        except Closed:
            if chain.close_after is None:
                raise
        else:
            if got != list(range(chain.items)):
                raise Deviation(f"{got} came out of {chain.items}")
            if self._governor.charged or self._governor._early or self._governor._waiting:
                raise Deviation(
                    f"{self._governor.charged} bytes are still charged behind the last item"
                )
        # What was reserved and turns out larger is not held back any more: of that, the limit promises nothing.
        if chain.grown == chain.sizes and getattr(self._governor, "peak", 0) > self._governor.limit:
            raise Deviation(
                f"{self._governor.peak} bytes were charged at a time, of {self._governor.limit}"
            )
        if got != list(range(len(got))):
            raise Deviation(f"{got} is not the order of the input")
        self._taken = chain.items
        for pool in self._pools:
            pool.close()
        for thread in (agent, closer):
            thread.join()
        for stage, done in enumerate(self._done):
            if max(done) > 1 or (len(got) == chain.items and not all(done)):
                raise Deviation(f"stage {stage} worked {done} times on its items")

    def _input(self) -> Any:
        for number in range(self._chain.items):
            if self._chain.fails == (-1, number):
                raise Wrong
            yield Item(number, None)

    def _gather(self, items: Any) -> Pool:
        """The stage that puts pieces together. Each takes a byte until its item is there."""
        chain, held = self._chain, list[Item]()

        def work(piece: Item, charge: Charge) -> Item:
            self._run.point("work")
            return Item(piece.number, charge)

        def add(piece: Item) -> Any:
            held.append(piece)
            if len(held) == chain.pieces:
                yield (*held,)
                held.clear()

        def finish(pieces: tuple[Item, ...], charge: Charge) -> Item:
            self._run.point("work")
            for piece in pieces:
                assert piece.charge is not None
                assert piece.number == pieces[0].number
                piece.charge.release()
            return Item(pieces[0].number, charge)

        return Pool(
            StageCounters("pieces"),
            (item for item in items for _ in range(chain.pieces)),
            lambda: work,
            workers=self._run.chance.randint(1, 3),
            limit_bytes=self._run.chance.choice((1, 5, 100)),
            governor=self._governor,
            size=lambda _: 1,
            measure=lambda _: (1, 1),
            gatherer=Gatherer(
                add,
                lambda pieces: chain.sizes[pieces[0].number],
                finish,
            ),
        )

    def _work(self, stage: int) -> Any:
        def work(item: Item, charge: Charge) -> Item:
            self._run.point("work")
            self._done[stage][item.number] += 1
            if self._chain.fails == (stage, item.number):
                raise Wrong
            if self._run.chance.random() < 0.2:
                Time.sleep(0.01)
            if item.charge is not None:
                item.charge.release()
            return Item(item.number, charge)

        return work

    def _turn(self) -> None:
        for _ in range(self._chain.turns):
            Time.sleep(self._run.chance.random() * 0.02)
            stage = self._run.chance.randrange(len(self._pools))
            pool = self._pools[stage]
            if self._run.chance.random() < 0.7:
                pool.resize(self._run.chance.randint(1, 4))
            else:
                pool.limit(self._run.chance.choice((1, 5, 100)))

    def _close(self) -> None:
        chain = self._chain
        if chain.close_after is None:
            return
        while self._taken < chain.close_after:
            Time.sleep(0.003)
        for pool in self._pools:
            pool.close()
