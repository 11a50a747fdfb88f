"""Loads batches from Parquet by a pipeline that tunes itself: `Loader`, which training loops import."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from sluice.agent.report.run_folder import start_or_resume
from sluice.agent.tunable import Policy
from sluice.agent.tuning import TunedRun, TuningStatus, policy_of
from sluice.common.lines import say
from sluice.common.suggest import left
from sluice.etl.spec.permission import Permission
from sluice.ingest.batch import FORMS, Batch
from sluice.ingest.cache.made_rows import place_of
from sluice.ingest.choices import Errors, History
from sluice.ingest.errors import LoaderError
from sluice.ingest.knobs import DECODE, Knobs, nearest, parse_bytes
from sluice.ingest.loader import BatchLoader
from sluice.ingest.machine import Machine
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order
from sluice.ingest.stages.transform import UserTransform

if TYPE_CHECKING:
    from sluice.etl.spec.spec import Spec
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.plain.roles import Roles
    from sluice.ingest.read.parquet_files import ParquetFiles
    from sluice.ingest.read.source_files import Paths


_RECORDED = ("batch_size", "split", "ranks", "seed", "memory_limit", "cores")
"""The settings that a run folder has as they are."""
_REPORTED_SKIPS = 0.01
"""A line on standard error reports skipped rows if they are more than this share of an epoch."""
_KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("batch_size", "rank", "ranks", "seed", "read_ahead_epochs", "version", "cores"),
        (Integral, "8"),
    ),
    "memory_limit": ((Integral, str), "'2GiB'"),
    "cache": ((str, os.PathLike), "'auto'"),
    "cache_limit": ((Integral, str), "'20GiB'"),
    "roles": ((Mapping, str), "'label=click;dense=I*;sparse=C*'"),
    "hash": (Mapping, "{'user': 1_000_000}"),
    "knobs": (Knobs, "Knobs(workers={'decode': 2})"),
    "order": (Order, "Order(shuffle=False)"),
    "errors": (Errors, "Errors(on_error='quarantine')"),
    "history": (History, "History(by='user', time='time', columns=['item'], last=100)"),
    "reading": (Reading, "Reading(reader='arrow')"),
}
"""The types that some arguments must have, with an example of each."""


class Loader(BatchLoader):
    """Batches of a table for one rank, loaded by a pipeline that an agent tunes while you train.

        with Loader("clicks/*.parquet", batch_size=8192, tuning="auto") as loader:
            for epoch in range(3):
                for batch in loader:
                    ...
            print(loader.tuning)

    The rows of an epoch and their order depend on the files, the epoch, `split`, `batch_size`, `seed` and `order`, and
    never on the tuning. Each `iter()` is one epoch. If you break off an epoch, the next `iter()` begins the next one.
    For torch a loader is an IterableDataset of whole batches: `DataLoader(loader, batch_size=None)` gives the same
    batches in this process.

    The agent is a thread that reads the counters two to four times a second. It starts with the first batch and stops
    when the loader is closed, garbage-collected or the interpreter exits. Each rank tunes its own loader within its
    part of the host's cores and memory. Ranks need not agree, because the order does not depend on the knobs. The ranks
    that share a host are torchrun's LOCAL_WORLD_SIZE, or all `ranks` if it is not set. `dlrm.train` has one agent for
    all ranks of a host.

    Rows: `source` is a feature table; a Delta or Iceberg table of any program; or any Parquet: a folder, a glob or a
    list of files. Folders such as `day=2026-01-01` are columns.

    - `version` is that of a table, by default its newest. In Iceberg it is the id of a snapshot. `TABLE@v3` says the
      same.
    - `batch_size` is global: a rank gets `batch_size / ranks` rows a step.
    - `split` is the split to load. `rank` is this loader's number among `ranks`. `seed` and `order` decide the order.
    - `read_ahead_epochs` is N: the loader reads ahead from one epoch into the next only within the first N epochs. Each
      later epoch is read after the one before has ended. N does not limit the number of epochs.

    Columns:

    - `roles` says what the columns of plain Parquet are, as {"label": "click", "dense": ["I*"], …} or as
      "label=click;dense=I*;sparse=user%1000000". Without `roles`, Sluice guesses them and prints them once.
    - `hash` makes ids of integers or texts: {"user": 1_000_000} spreads the values over 1,000,000 ids, from 2 on, as
      the operator `hash` of a feature table does. Id 1 is for missing values.
    - `spec` declares roles, ids and splits for plain Parquet. It is a file such as `sluice guess` writes.
      `sluice etl --spec` takes the same file.
    - `fill` replaces a missing number, for all columns or by name. `errors` says what happens to bad rows.
    - `history` gives each row the last events of its user before its own time (`History`).
    - `transforms` are functions over a batch as a dict of numpy arrays (`sluice.ingest.stages.transform.Transform`):
      a function, `module:function`, or one with a name. Only a function of an importable module can run in worker
      processes. Closures, lambdas and notebook functions run in threads, and so do functions with a name of their own.
      A state does not record their code: pass them again on resuming. Sluice cannot check that they still do the same
      thing.
    - `as_` is the form of a batch: `batch`; `dict`, tensors by column; `numpy`, arrays by column; `pandas`, a frame;
      or `kjt`, TorchRec's batch, which has no weights. All except the frame are views of the same memory.
    - `allow_code` names the modules whose functions a table's spec may import (`sluice.etl.spec.permission`).

    Reading and resources: `reading` says how files are read.

    - `workers` lets other processes read and shuffle row groups, with the same rows in the same order. `local:4`
      starts four processes on this host, `ray://HOST:PORT` lets a Ray cluster place them, and
      `HOST:PORT,…?token=FILE` uses workers that `sluice worker` runs.
    - `cache` keeps what pure functions over rows make, in this folder or, with `auto`, in one of the user's, up to
      `cache_limit`.
    - `cores` is the most that reading and functions use. Threads and processes of the loader run on no others.
    - `memory_limit` is for the whole process tree, in bytes or as "2GiB", and never more than the machine's.

    Tuning: `knobs` is the setting at the start.

    - `tuning` is `auto` (the default); `shadow`, which only reports what it would do; `fixed`; or
      a policy of your own. If you pass `knobs`, the default is `fixed`. `fixed` without `knobs` is one worker a stage.
      After you call `apply`, the agent no longer changes the knobs.
    - `run_dir` is a folder for measurements and decisions, with a report.html at the end; `sluice explain` prints it.
      A run of the same data, split, batch size and seed is continued, on any number of ranks. Without it nothing is
      written. Only rank 0 writes.
    """

    def __new__(cls, *_source: Any, **given: Any) -> Self:
        """Raises for an unknown argument, with the argument that may be meant, and for a value of a wrong type, with an
        example."""
        known = signature(cls.__init__).parameters.keys()
        for name in given.keys() - known:
            hint = left(f"Loader {name}") or nearest(name, known - {"self"})
            for argument, (kind, _) in _KINDS.items():
                if name in getattr(kind, "__dataclass_fields__", ()):
                    hint = f"; write {argument}={kind.__name__}({name}=…)"
            raise TypeError(f"{cls.__name__} has no argument {name!r}{hint}")
        for name in given.keys() & _KINDS.keys():
            value, (kind, example) = given[name], _KINDS[name]
            if value is not None and not isinstance(value, kind):
                raise LoaderError(
                    f"{name}={value!r} has the wrong type ({type(value).__name__}); write for instance {name}={example}"
                )
        return super().__new__(cls)

    def __init__(
        self,
        source: FeatureTable | ParquetFiles | Paths,
        *,
        batch_size: int,
        split: str = "train",
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        order: Order = Order(),
        read_ahead_epochs: int = 1,
        roles: Roles | str | None = None,
        hash: Mapping[str, int] | None = None,
        spec: Spec | str | os.PathLike[str] | None = None,
        fill: Mapping[str, float] | float | None = None,
        errors: Errors = Errors(),
        history: History | None = None,
        transforms: Iterable[UserTransform] = (),
        as_: str = "batch",
        version: int | None = None,
        allow_code: Permission | Iterable[str] = (),
        reading: Reading = Reading(),
        workers: str | None = None,
        memory_limit: int | str | None = None,
        cores: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str = "20GiB",
        knobs: Knobs | None = None,
        tuning: str | Policy | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ):
        policy = _policy(tuning, knobs)  # refuses before anything starts
        self._convert = _form(as_)
        super().__init__(
            source,
            batch_size=batch_size,
            split=split,
            rank=rank,
            ranks=ranks,
            seed=seed,
            order=order,
            read_ahead_epochs=read_ahead_epochs,
            roles=roles,
            hash=hash,
            spec=spec,
            fill=fill,
            errors=errors,
            history=history,
            transforms=transforms,
            version=version,
            allow_code=allow_code,
            reading=reading,
            workers=workers,
            cores=cores,
            cache=place_of(cache, cache_limit, read_ahead_epochs),
            **_share_of_host(ranks, memory_limit),
            knobs=knobs,
        )
        self._begin(policy, None if rank else run_dir, as_)

    def _begin(self, policy: Policy, run_dir: str | os.PathLike[str] | None, as_: str) -> None:
        """Starts what needs the opened table. If that fails, the table is closed."""
        given = self._config
        try:
            if as_ == "kjt":
                _refuse_without_weights(self.table, given.order, given.errors)
            self._tuned = self._tune(policy, run_dir)
        except BaseException:
            super().close()
            raise
        if given.rank == 0:
            self._report_plan()

    def _report_plan(self) -> None:
        """Prints what the order of rows costs: a late first batch, and skipped rows."""
        plan = self.plan
        if self.huge_group:
            say(f"{self.table.uri}: {plan.describe_huge_group()}")
        if plan.dropped > _REPORTED_SKIPS * plan.rows:
            say(
                f"{self.table.uri}: each epoch skips {plan.dropped:,} of {plan.rows:,} rows, because they do not fill "
                f"a batch of {plan.batch_size:,}. Every epoch skips different rows. To keep them, pass "
                "order=Order(last='pad')"
            )

    def _tune(self, policy: Policy, run_dir: str | os.PathLike[str] | None) -> TunedRun:
        """Makes the agent and the run folder. The agent starts with the first batch."""
        folder, given = None, self._config
        if given.knobs is None and policy.name == "fixed":
            one_each = dict.fromkeys(self.limits.workers, 1)
            if given.workers:
                del one_each[DECODE]  # remote readers keep their number
            super().apply(Knobs(workers=one_each))
        if run_dir is not None:
            config = {
                "kind": "load",
                "data": self.table.uri,
                "version": self.table.version,
                "tuning": policy.name,
                "reader": self.reader,
                "huge_row_group": self.huge_group,
                "dense": list(self.dense_names),
                "sparse": list(self.sparse_names),
                "transforms": {n: c or "code without a name" for n, c in self.code.items()},
                "knobs": self.knobs.to_dict(),
                **{name: getattr(given, name) for name in _RECORDED},
                "hash": dict(given.hash or {}),
                "order": asdict(given.order),
                "on_error": given.errors.on_error,
                **({"history": asdict(given.history)} if given.history else {}),
            }
            folder = start_or_resume(run_dir, config)
        # It must not hold the loader, which may be garbage-collected before the run ends.
        tuned = TunedRun(self.tunable, policy, folder=folder, outcome=self.tunable.outcome)
        self.observer = tuned
        weakref.finalize(self, tuned.abandon).atexit = False
        return tuned

    def __iter__(self) -> Iterator[Any]:
        return self._converted(super().__iter__())

    def _converted(self, batches: Iterator[Batch]) -> Iterator[Any]:
        """Yields batches in the requested form. It keeps no reference to a batch, because the batch's memory is
        reused."""
        try:
            yield from (batches if self._convert is None else map(self._convert, batches))
        finally:
            batches.close()  # type: ignore[attr-defined] # an epoch is a generator

    def __repr__(self) -> str:
        return f"Loader({self.described}; tuning {self.tuning.mode})"

    @property
    def tuning(self) -> TuningStatus:
        """What the agent does and why. `str()` gives a sentence. The fields have the numbers."""
        return self._tuned.status

    def apply(self, knobs: Knobs) -> None:
        """Changes the knobs while running. Rows and their order stay the same. The agent no longer changes them."""
        self._tuned.turn(knobs)

    def __exit__(self, *error: Any) -> None:
        self._tuned.failed(error[1])
        self.close()

    def close(self) -> None:
        """Stops the agent and the pipeline, from any state. A second call does nothing."""
        was_open, quarantined = not self.closed, self.quarantined
        try:
            self._tuned.close()
        finally:
            super().close()
        if was_open and (rows := quarantined["rows_set_aside"]):
            reasons = ", ".join(
                f"{why}: {count:,}" for why, count in quarantined["reasons"].items()
            )
            say(f"{rows:,} rows were quarantined ({reasons}); {quarantined['file']} lists them")


def _policy(tuning: str | Policy | None, knobs: Knobs | None) -> Policy:
    usual = "auto" if knobs is None else "fixed"
    return policy_of(usual if tuning is None else tuning)


def _refuse_without_weights(
    table: FeatureTable | ParquetFiles, order: Order, errors: Errors
) -> None:
    """Raises LoaderError if rows need weights, which `kjt` does not have."""
    weights = [column.name for column in table.fields if column.role == "weight"]
    if errors.on_error == "quarantine":
        why = "on_error='quarantine' needs weights for quarantined rows. Use on_error='raise'"
    elif order.last == "pad":
        why = "last='pad' needs weights for the rows that fill a batch. Use last='drop'"
    elif weights:
        why = f"column {weights[0]!r} has the weights of rows. Leave the column out by roles="
    else:
        return
    raise LoaderError(
        f"as_='kjt' gives batches without weights, and {why}, or as_='batch' and batch.kjt()"
    )


def _form(as_: str) -> Any:
    if as_ not in FORMS:
        raise LoaderError(f"as_={as_!r} is none of {', '.join(FORMS)}{nearest(as_, FORMS)}")
    return FORMS[as_]


def _share_of_host(ranks: int, memory_limit: int | str | None) -> dict[str, Any]:
    """Returns this rank's part of the host's cores and memory, and its memory limit, as arguments of a loader."""
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharers = max(1, int(local_ranks)) if local_ranks.isdigit() else ranks
    machine = Machine(sharers=sharers)
    limits = [] if memory_limit is None else [parse_bytes(memory_limit)]
    if sharers > 1:
        limits.append(machine.memory_limit() // sharers)
    return {"machine": machine, "memory_limit": min(limits, default=None)}
