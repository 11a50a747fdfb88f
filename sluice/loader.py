"""Loads batches from Parquet by a pipeline that tunes itself: `Loader`, which training loops import."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import IterableDataset

from sluice.agent.report.run_folder import Run, RunFolder
from sluice.agent.runtime.foreknowledge import foreknowledge
from sluice.agent.tunable import Policy
from sluice.agent.tuning import TunedRun, TuningStatus, policy_of
from sluice.etl.spec.permission import Permission
from sluice.ingest.batch import FORMS, Batch
from sluice.ingest.choices import Errors, History
from sluice.ingest.errors import LoaderError
from sluice.ingest.knobs import DECODE, Knobs, nearest, parse_bytes
from sluice.ingest.loader import BatchLoader
from sluice.ingest.machine import Machine, SharedMachine
from sluice.ingest.read.parquet_files import ParquetFiles, table_of
from sluice.ingest.read.petastorm.options import split_transform_spec
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order, RowsPlan
from sluice.ingest.stages.transform import UserTransform, transforms_of
from sluice.ingest.stats import LoaderStats, Snapshot

if TYPE_CHECKING:
    from sluice.etl.spec.spec import Spec
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.parquet_files import Paths, Roles


_REPORTED_SKIPS = 0.01
"""A line on standard error reports skipped rows if they are more than this share of an epoch."""
_KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("batch_size", "rank", "ranks", "seed", "read_ahead_epochs", "epochs", "version"),
        (Integral, "8"),
    ),
    "memory_limit": ((Integral, str), "'2GiB'"),
    "roles": ((Mapping, str), "'label=click;dense=I*;sparse=C*'"),
    "hash": (Mapping, "{'user': 1_000_000}"),
    "knobs": (Knobs, "Knobs(workers={'decode': 2})"),
    "order": (Order, "Order(shuffle=False)"),
    "errors": (Errors, "Errors(on_error='quarantine')"),
    "history": (History, "History(by='user', time='time', columns=['item'], last=100)"),
    "reading": (Reading, "Reading(reader='arrow')"),
}
"""The types that some arguments must have, with an example of each."""


class Loader(IterableDataset[Any]):
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

    The agent is a thread that reads the counters once a second. It starts with the first batch and stops when the
    loader is closed, garbage-collected or the interpreter exits. Each rank tunes its own loader within its part of the
    host's cores and memory. Ranks need not agree, because the order does not depend on the knobs. The ranks that share
    a host are torchrun's LOCAL_WORLD_SIZE, or all `ranks` if it is not set. `dlrm.train` has one agent for all ranks of
    a host.

    Rows: `source` is a feature table; a Delta or Iceberg table of any program; or any Parquet: a folder, a glob or a
    list of files. Folders such as `day=2026-01-01` are columns.

    - `version` is that of a table, by default its newest. In Iceberg it is the id of a snapshot. `TABLE@v3` says the
      same.
    - `batch_size` is global: a rank gets `batch_size / ranks` rows a step.
    - `split` is the split to load. `rank` is this loader's number among `ranks`. `seed` and `order` decide the order.
    - `read_ahead_epochs` is N: the loader reads ahead from one epoch into the next only within the first N epochs. Each
      later epoch is read after the one before has ended. N does not limit the number of epochs. `epochs` is its old
      name and warns.

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
    - `memory_limit` is for the whole process tree, in bytes or as "2GiB", and never more than the machine's.

    Tuning: `knobs` is the setting at the start.

    - `tuning` is `auto` (the default); `planner`; `shadow`, which only reports what it would do; `fixed`; or a policy
      of your own. If you pass `knobs`, the default is `fixed`. `fixed` without `knobs` is one worker a stage. After
      you call `apply`, the agent no longer changes the knobs.
    - `run_dir` is a folder for measurements and decisions, with a report.html at the end; `sluice explain` prints it.
      A run of the same data, split, batch size, ranks and seed is continued. Without it nothing is written. Only
      rank 0 writes.
    """

    def __new__(cls, *_source: Any, **given: Any) -> Self:
        """Raises for an unknown argument, with the argument that may be meant, and for a value of a wrong type, with an
        example."""
        known = signature(cls.__init__).parameters.keys()
        for name in given.keys() - known:
            hint = nearest(name, known - {"self", "epochs"})
            for argument, (kind, _) in _KINDS.items():
                if name in getattr(kind, "__dataclass_fields__", ()):
                    hint = f"; write {argument}={kind.__name__}({name}=…)"
            raise TypeError(f"{cls.__name__} has no argument {name!r}{hint}")
        for name, value in given.items():
            kind, example = _KINDS.get(name, (object, ""))
            if not (value is None or isinstance(value, kind)):
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
        knobs: Knobs | None = None,
        tuning: str | Policy | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        epochs: int | None = None,
    ):
        if epochs is not None:
            warnings.warn(
                "Loader(epochs=…) is now Loader(read_ahead_epochs=…): it limits read-ahead, not the number of epochs",
                FutureWarning,
                stacklevel=2,
            )
            read_ahead_epochs = epochs
        if tuning is None:
            tuning = "auto" if knobs is None else "fixed"
        mode = policy_of(tuning).name
        self._convert = _converter_of(as_, order, errors)
        functions, transform_spec = split_transform_spec(transforms)
        own = transforms_of(functions)
        table = table_of(
            source,
            roles,
            allow_code,
            hash,
            spec,
            version=version,
            transform_spec=transform_spec,
            functions=tuple(one for one in own if one.gives),
        )
        if as_ == "kjt":
            _refuse_weight_column(table)
        machine, limit = _share_of_host(
            ranks, None if memory_limit is None else parse_bytes(memory_limit)
        )
        self._batches = BatchLoader(
            table,
            batch_size=batch_size,
            split=split,
            rank=rank,
            ranks=ranks,
            seed=seed,
            read_ahead_epochs=read_ahead_epochs,
            knobs=knobs,
            order=order,
            reading=reading,
            errors=errors,
            transforms=own if transform_spec is None else [transform_spec, *own],
            fill=fill,
            memory_limit=limit,
            workers=workers,
            machine=machine,
            allow_code=allow_code,
            history=history,
        )
        settings = {
            "batch_size": batch_size,
            "split": split,
            "ranks": ranks,
            "seed": seed,
            "hash": dict(hash or {}),
            "order": asdict(order),
            "on_error": errors.on_error,
            **({"history": asdict(history)} if history else {}),
            "memory_limit": limit,
        }
        try:
            if knobs is None and mode == "fixed":
                self._batches.apply(self._one_worker_a_stage(remote=workers is not None))
            self._tuned = self._tune(tuning, table, None if rank else run_dir, settings)
        except BaseException:
            self._batches.close()
            raise
        if rank == 0:
            _report_plan(table.uri, self.plan)

    def _tune(
        self,
        tuning: str | Policy,
        table: FeatureTable | ParquetFiles,
        run_dir: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
    ) -> TunedRun:
        """Makes the agent and the run folder with these settings. The agent starts with the first batch."""
        batches = self._batches
        policy = policy_of(tuning, foreknowledge(batches))
        folder = None
        if run_dir is not None:
            config = {
                "kind": "load",
                "data": table.uri,
                "version": table.version,
                "tuning": policy.name,
                "reader": self.reader,
                "huge_row_group": self.plan.huge_group,
                "dense": list(self.dense_names),
                "sparse": list(self.sparse_names),
                "transforms": {n: c or "code without a name" for n, c in batches.code.items()},
                "knobs": self.knobs.to_dict(),
            }
            config |= settings
            folder = RunFolder.create(run_dir, config, resume=_is_same_run(Path(run_dir), config))
        tuned = TunedRun(
            batches.tunable,
            policy,
            folder=folder,
            # It must not hold the loader, which may be garbage-collected before the run ends.
            outcome=batches.tunable.outcome,
        )
        batches.observer = tuned
        weakref.finalize(batches, tuned.abandon).atexit = False
        return tuned

    def _one_worker_a_stage(self, remote: bool) -> Knobs:
        """Returns the setting of `tuning="fixed"` without knobs. Remote readers keep their number."""
        workers = dict.fromkeys(self._batches.limits.workers, 1)
        if remote:
            workers[DECODE] = self.knobs.workers[DECODE]
        return Knobs(workers=workers)

    def __iter__(self) -> Iterator[Any]:
        return self._epoch(iter(self._batches))

    def _epoch(self, batches: Iterator[Batch]) -> Iterator[Any]:
        """Yields batches in the requested form. It keeps no reference to a batch, because the batch's memory is
        reused."""
        try:
            yield from (batches if self._convert is None else map(self._convert, batches))
        finally:
            batches.close()  # type: ignore[attr-defined] # an epoch is a generator

    def __repr__(self) -> str:
        return f"Loader({self._batches.described}; tuning {self.tuning.mode})"

    __reduce__ = BatchLoader.__reduce__

    def __len__(self) -> int:
        """The number of steps of an epoch, the same on every rank."""
        return len(self._batches)

    # ---- tuning

    @property
    def tuning(self) -> TuningStatus:
        """What the agent does and why. `str()` gives a sentence. The fields have the numbers."""
        return self._tuned.status

    @property
    def knobs(self) -> Knobs:
        """The current knobs."""
        return self._batches.knobs

    def apply(self, knobs: Knobs) -> None:
        """Changes the knobs while running. Rows and their order stay the same. The agent no longer changes them."""
        self._tuned.turn(knobs)

    def snapshot(self) -> Snapshot:
        """Returns the counters since the start."""
        return self._batches.snapshot()

    def stats(self) -> LoaderStats:
        """Returns this rank's figures: rows a second, share of time waiting, and how long batches and stages took
        (`LoaderStats`). The first batch and the wait for it do not count. `to_dict()` gives the figures to a logger.
        `since(earlier)` limits them to the time since then."""
        return self._batches.stats()

    def resting(self) -> AbstractContextManager[None]:
        """Returns a context that pauses the measurements, for work that is not training, such as a validation or a
        checkpoint. Its time counts neither as waiting nor as computing, and the agent ignores it."""
        return self._batches.resting()

    # ---- the rows

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The columns of numbers, in the order of `batch.dense`."""
        return self._batches.dense_names

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """The columns of ids, in the order of `batch.values`."""
        return self._batches.sparse_names

    @property
    def cardinalities(self) -> Mapping[str, int]:
        """The number of rows that an embedding of each column of ids needs. For plain files it is one more than the
        largest id, if the files' footers record that."""
        return self._batches.cardinalities

    @property
    def plan(self) -> RowsPlan:
        """The order of the rows of each epoch."""
        return self._batches.plan

    @property
    def reader(self) -> str:
        """The reader that decodes: `petastorm` or `arrow`."""
        return self._batches.reader

    @property
    def order_hash(self) -> str | None:
        """The order hash of the last finished epoch: a hash of the ids of this rank's rows and of their order. It does
        not depend on the knobs. Each rank has its own."""
        return self._batches.order_hash

    @property
    def quarantined(self) -> dict[str, Any]:
        """The rows quarantined so far: how many, why, and the file that lists them."""
        return self._batches.quarantined

    def place_of(self, epoch: int, step: int, row: int) -> str:
        """Returns where a row of this rank's batch comes from: file, row group and, unless rows are drawn by weight,
        the row in it. Empty for a row that only fills the batch."""
        return self._batches.place_of(epoch, step, row)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch, for JSON. It fits other knobs and other numbers of ranks.
        `transforms` maps each transform's name to `module:function`, or to None for code that cannot be imported."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `iter()` continue from this position. Raises if the state belongs to other rows or another
        order, or if one of its transforms is not given now. Sluice cannot check that a transform still does the same
        thing."""
        self._batches.load_state_dict(state)

    # ---- memory

    def memory(self) -> dict[str, Any]:
        """Returns how memory is used, in bytes: the limit, the smallest sufficient limit with its parts, and memory
        that is charged to no work. Also how often work had to wait for memory, by reason."""
        return self._batches.memory()

    @property
    def memory_need(self) -> str:
        """The smallest sufficient memory limit and its parts, as a text."""
        return self._batches.memory_need

    # ---- the end

    def __enter__(self) -> Self:
        self._batches.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tuned.failed(error[1])
        self.close()

    def close(self) -> None:
        """Stops the agent and the pipeline, from any state. A second call does nothing."""
        quarantined = self.quarantined
        was_open = not self._batches.closed
        try:
            self._tuned.close()
        finally:
            self._batches.close()
        if was_open and quarantined["rows_set_aside"]:
            reasons = ", ".join(
                f"{reason}: {rows:,}" for reason, rows in quarantined["reasons"].items()
            )
            print(
                f"{quarantined['rows_set_aside']:,} rows were quarantined ({reasons}); {quarantined['file']} lists "
                "them",
                file=sys.stderr,
            )


def _converter_of(name: str, order: Order, errors: Errors) -> Callable[[Batch], Any] | None:
    """Returns the function that converts a batch to this form, or None for `batch`. Raises LoaderError if rows need
    weights and the form has none."""
    if name not in FORMS:
        raise LoaderError(f"as_={name!r} is none of {', '.join(FORMS)}{nearest(str(name), FORMS)}")
    if name == "kjt" and errors.on_error == "quarantine":
        raise LoaderError(
            "as_='kjt' gives batches without weights, and on_error='quarantine' needs weights for quarantined rows. "
            "Use on_error='raise', or as_='batch' and batch.kjt()"
        )
    if name == "kjt" and order.last == "pad":
        raise LoaderError(
            "as_='kjt' gives batches without weights, and last='pad' needs weights for the rows that fill a batch. "
            "Use last='drop', or as_='batch' and batch.kjt()"
        )
    return FORMS[name]


def _refuse_weight_column(table: FeatureTable | ParquetFiles) -> None:
    for column in table.fields:
        if column.role == "weight":
            raise LoaderError(
                f"as_='kjt' gives batches without weights, and column {column.name!r} has the weights of rows. "
                "Use as_='batch' and batch.kjt() with batch.weight, or leave the column out by roles="
            )


def _is_same_run(folder: Path, config: Mapping[str, Any]) -> bool:
    """Returns whether a folder has a run that this one may continue."""
    if not (folder / "config.json").is_file():
        return False
    before = Run.read(folder).config
    names = ("kind", "data", "split", "batch_size", "ranks", "seed")
    return all(before.get(name) == config[name] for name in names)


def _report_plan(table: str, plan: RowsPlan) -> None:
    """Prints what the order of rows costs: a late first batch, and skipped rows."""
    if plan.huge_group:
        print(f"{table}: {plan.describe_huge_group()}", file=sys.stderr)
    if plan.dropped > _REPORTED_SKIPS * plan.rows:
        print(
            f"{table}: each epoch skips {plan.dropped:,} of {plan.rows:,} rows, because they do not fill a batch of "
            f"{plan.batch_size:,}. Every epoch skips different rows. To keep them, pass order=Order(last='pad')",
            file=sys.stderr,
        )


def _share_of_host(ranks: int, memory_limit: int | None) -> tuple[Machine, int | None]:
    """Returns this rank's part of the host's cores and memory, and its memory limit."""
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    sharers = max(1, int(local_ranks)) if local_ranks.isdigit() else ranks
    if sharers == 1:
        return Machine(), memory_limit
    machine = SharedMachine(sharers)
    share = machine.memory_limit() // sharers
    return machine, share if memory_limit is None else min(memory_limit, share)
