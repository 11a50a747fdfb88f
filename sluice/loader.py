"""What a training loop imports: `Loader`, batches from Parquet by a pipeline that tunes itself."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from sluice.agent.report.live_server import shown
from sluice.agent.report.run_folder import RunFolder
from sluice.agent.runtime.foreknowledge import foreknowledge
from sluice.agent.tunable import Policy
from sluice.agent.tuning import TunedRun, TuningStatus, policy_of
from sluice.etl.spec.permission import Permission
from sluice.ingest.batch import FORMS, Batch
from sluice.ingest.knobs import Knobs, nearest, parse_bytes
from sluice.ingest.loader import BatchLoader, LoaderError
from sluice.ingest.machine import Machine, SharedMachine
from sluice.ingest.progress import Progress
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.packed_copy import PackedCopy
from sluice.ingest.read.parquet_files import ParquetFiles, table_of
from sluice.ingest.read.petastorm.options import PetastormOptions, without_spec
from sluice.ingest.row_order import RowsPlan
from sluice.ingest.stages.batch import Ready
from sluice.ingest.stages.quarantine import Errors
from sluice.ingest.stages.table_operators import Operators
from sluice.ingest.stages.transform import UserTransform

if TYPE_CHECKING:
    from sluice.etl.spec.spec import Spec
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.parquet_files import Paths, Roles


_NOTABLE = 0.01  # a line reports skipped rows from this share of an epoch on


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of rows. A state with another order is refused on resuming."""

    shuffle: bool = True
    """False: rows come as they are stored."""
    last: str = "drop"
    """What happens to rows that do not fill a batch at an epoch's end. `drop` skips them (other rows in each epoch).
    `pad` fills the batch with rows of weight 0."""
    window_rows: int | None = None
    """The rows of a stream that are mixed with each other; None: 32,768. More rows mix better and take more memory."""
    streams: int | None = None
    """The parts of an epoch from which every batch takes rows; None: the largest power of two up to 8 that divides the
    batch size. Ranks share the same global batches if their number divides `streams`, or is a multiple of it that
    divides the batch size."""
    sample: str | None = None
    """A column of weights. Rows are then drawn by weight, with replacement; an epoch keeps its number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How files are read. All ways give the same rows."""

    reader: str | None = None
    """`petastorm` or `arrow`; None: Petastorm if it is installed, else Arrow."""
    files: FileOpener | None = field(default=None, repr=False)
    """Opens remote files, with other retries or with a cache. The loader closes it."""
    packed: PackedCopy | None = None
    """Keeps a packed copy of local row groups, which is decoded much faster; None: no copy."""
    petastorm: PetastormOptions = PetastormOptions()
    """Options of Petastorm's Reader: a predicate, a row-group selector, a schema, a cache."""


_KINDS: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("batch_size", "rank", "ranks", "seed", "read_ahead_epochs", "epochs"), (Integral, "8")
    ),
    "live": (Integral, "8080"),
    "memory_limit": ((Integral, str), "'2GiB'"),
    "roles": ((Mapping, str), "'label=click;dense=I*;sparse=C*'"),
    "hash": (Mapping, "{'user': 1_000_000}"),
    "knobs": (Knobs, "Knobs(workers={'read': 2})"),
    "order": (Order, "Order(shuffle=False)"),
    "errors": (Errors, "Errors(on_error='quarantine')"),
    "reading": (Reading, "Reading(reader='arrow')"),
}
"""What some arguments must be, with an example of each."""


class Loader(BatchLoader):
    """Batches of a table for one rank, loaded by a pipeline that an agent tunes while you train.

        with Loader("clicks/*.parquet", batch_size=8192, tuning="auto") as loader:
            for epoch in range(3):
                for batch in loader:
                    ...
            print(loader.tuning)

    The rows of an epoch and their order depend on the files, `seed` and the epoch alone, and never on the tuning. Each
    `iter()` is one epoch. If you break off an epoch, the next `iter()` begins the next one. For torch a loader is an
    IterableDataset of whole batches: `DataLoader(loader, batch_size=None)` gives the same batches in this process.

    The agent is a thread that looks once a second. It starts with the first batch and stops when the loader is closed,
    garbage-collected or the interpreter exits. Ranks need no agreement, as the order does not depend on the knobs: each
    rank tunes its own loader within its part of the host's cores and memory. torchrun's LOCAL_WORLD_SIZE says how many
    ranks share the host; without it, all `ranks` do. `dlrm.train` has one agent for all ranks of a host.
    """

    def __new__(cls, *_source: Any, **given: Any) -> Self:
        """Refuses an unknown argument with the name that may be meant, and a value of a wrong type with an example."""
        known = signature(cls.__init__).parameters
        for name in given.keys() - known.keys():
            raise TypeError(f"{cls.__name__} has no argument {name!r}{nearest(name, known)}")
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
        tuning: str | Policy | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        live: int | None = None,
        transforms: Iterable[UserTransform] = (),
        roles: Roles | str | None = None,
        hash: Mapping[str, int] | None = None,
        spec: Spec | str | os.PathLike[str] | None = None,
        fill: Mapping[str, float] | float | None = None,
        split: str = "train",
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        read_ahead_epochs: int = 1,
        memory_limit: int | str | None = None,
        knobs: Knobs | None = None,
        order: Order = Order(),
        errors: Errors = Errors(),
        reading: Reading = Reading(),
        workers: str | None = None,
        as_: str = "batch",
        allow_code: Permission | Iterable[str] = (),
        epochs: int | None = None,
    ):
        """`source` is a feature table, or any Parquet: a folder, a glob or a list of files.

        `batch_size` is global: a rank gets `batch_size / ranks` rows a step.
        `tuning` is `auto` (the default); `planner`; `shadow`, which only reports what it would do; `fixed`; or a policy
        of your own. If you pass `knobs`, the default is `fixed`. `fixed` without `knobs` is one worker a stage. After
        you call `apply`, the agent no longer changes the knobs.
        `run_dir` is a new folder for measurements and decisions, with a report.html at the end; `sluice explain` prints
        it. Without it nothing is written. Only rank 0 writes.
        `live` is a port of 127.0.0.1 that shows this report while it grows; 0: any free port.
        `transforms` are functions over a batch as a dict of numpy arrays (`sluice.ingest.stages.transform.Transform`):
        a function, `module:function`, or one with a name. Only a function of an importable module can run in worker
        processes. Closures, lambdas, notebook functions and functions with a name of their own run in threads. A state
        records these without code: pass them again on resuming; Sluice cannot check that they still do the same thing.
        `roles` says what the columns of plain Parquet are, as {"label": "click", "dense": ["I*"], …} or as
        "label=click;dense=I*;sparse=user%1000000". Without it they are guessed, and printed once.
        `hash` makes ids of integers or texts: {"user": 1_000_000} spreads the values over so many ids, from 2 on, just
        as the operator `hash` of a feature table does; id 1 is for missing values.
        `spec` says all this of plain Parquet, and how rows are split. It is a file such as `sluice guess` writes, which
        `sluice etl --spec` takes too.
        `fill` replaces a missing number, for all columns or by name.
        `read_ahead_epochs` limits read-ahead, not the number of epochs. `epochs` is its old name and warns.
        `memory_limit` is for the whole process tree, in bytes or as "2GiB", and never more than the machine's.
        `as_` is the form of a batch: `batch`; `dict`, tensors by column; `numpy`, arrays by column; `pandas`, a frame;
        or `kjt`, TorchRec's batch, which has no weights. All but the frame are views.
        `workers` lets other processes read and shuffle row groups, with the same rows in the same order. `local:4`
        starts four processes on this host, `ray://HOST:PORT` lets a Ray cluster place them, and
        `HOST:PORT,…?token=FILE` uses workers that `sluice worker` runs.
        `knobs` is the setting at the start. `allow_code` names the modules whose functions a table's spec may import
        (`sluice.etl.spec.permission`)."""
        if epochs is not None:
            warnings.warn(
                "Loader(epochs=…) is now Loader(read_ahead_epochs=…): it limits read-ahead, not the number of epochs",
                FutureWarning,
                stacklevel=2,
            )
            read_ahead_epochs = epochs
        if live is not None and run_dir is None:
            raise LoaderError(
                f"live={live} shows the report of a run folder, and there is none; name one with run_dir"
            )
        self._form = _form_named(as_, order, errors)
        self._page = ExitStack()
        if tuning is None:
            tuning = "auto" if knobs is None else "fixed"
        policy = policy_of(tuning)
        table = table_of(
            source, roles, allow_code, hash, spec, transform_spec=without_spec(transforms)[1]
        )
        if as_ == "kjt":
            _refuse_weight_column(table)
        machine, memory_limit = _share_of_host(
            ranks, None if memory_limit is None else parse_bytes(memory_limit)
        )
        super().__init__(
            table,
            batch_size=batch_size,
            split=split,
            rank=rank,
            ranks=ranks,
            seed=seed,
            epochs=read_ahead_epochs,
            knobs=knobs,
            shuffle=order.shuffle,
            streams=order.streams,
            window_rows=order.window_rows,
            last=order.last,
            sample=order.sample,
            memory_limit=memory_limit,
            reader=reading.reader,
            petastorm=reading.petastorm,
            transforms=transforms,
            fill=fill,
            errors=errors,
            files=reading.files,
            packed=reading.packed,
            machine=machine,
            workers=workers,
            allow_code=allow_code,
        )
        record = {
            "kind": "load",
            "data": table.uri,
            "version": table.version,
            "tuning": policy.name,
            "reader": self.reader,
            "batch_size": batch_size,
            "split": split,
            "ranks": ranks,
            "seed": seed,
            "dense": list(self.dense_names),
            "sparse": list(self.sparse_names),
            "hash": dict(hash or {}),
            "transforms": {n: code or "code without a name" for n, code in self._code.items()},
            "order": asdict(order),
            "on_error": errors.on_error,
            "memory_limit": memory_limit,
        }
        folder = None
        try:
            self._page.enter_context(
                shown(run_dir or "", None if rank else live, partial(print, file=sys.stderr))
            )
            if knobs is None and policy.name == "fixed":
                self._progress.apply(self._one_worker_a_stage(remote=workers is not None))
            if run_dir is not None and rank == 0:
                folder = RunFolder.create(run_dir, {**record, "knobs": self.knobs.to_dict()})
        except BaseException:
            super().close()
            self._page.close()
            raise
        if rank == 0:
            _report_skipped_rows(table.uri, self.plan)
        self._tuned = TunedRun(
            self._progress,
            policy_of(tuning, foreknowledge(self)),
            folder=folder,
            last=partial(_last_events, self._progress, self.operators, self.stored_bytes),
        )
        weakref.finalize(self, self._tuned.abandon).atexit = False

    def _one_worker_a_stage(self, remote: bool) -> Knobs:
        """Returns the setting of `tuning="fixed"` without knobs. Remote readers keep their number."""
        workers = dict.fromkeys(self.limits.workers, 1)
        if remote:
            workers["read"] = self.knobs.workers["read"]
        return Knobs(workers=workers)

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return batches if self._form is None else self._formed(batches)

    def _formed(self, batches: Iterator[Batch]) -> Iterator[Any]:
        """Yields batches in another form. It keeps no batch that it has yielded, as its memory is used again."""
        assert self._form is not None
        try:
            yield from map(self._form, batches)
        finally:
            batches.close()  # type: ignore[attr-defined] # an epoch is a generator

    @property
    def tuning(self) -> TuningStatus:
        """What the agent does and why. Printed, it is a sentence; its fields have the figures."""
        return self._tuned.status

    def apply(self, knobs: Knobs) -> None:
        """Changes the knobs while running. Rows and their order stay the same. The agent no longer changes them."""
        self._tuned.turn(knobs)

    def close(self) -> None:
        """Stops the agent and the pipeline, from any state. A second call does nothing."""
        quarantined = self.quarantined
        first = not self._closed
        with self._page:
            try:
                self._tuned.close()
            finally:
                super().close()
        if first and quarantined["rows_set_aside"]:
            reasons = ", ".join(
                f"{reason}: {rows:,}" for reason, rows in quarantined["reasons"].items()
            )
            print(
                f"{quarantined['rows_set_aside']:,} rows were quarantined ({reasons}); {quarantined['file']} lists "
                "them",
                file=sys.stderr,
            )

    def __exit__(self, *error: Any) -> None:
        self._tuned.failed(error[1])
        super().__exit__(*error)

    def _begin(self, iteration: int) -> Iterator[Ready]:
        run = super()._begin(iteration)
        self._tuned.start()
        return run

    def _count(self, batch: Batch) -> None:
        super()._count(batch)
        if not self._position.step:
            self._tuned.record(
                {"kind": "epoch", "epoch": self._position.epoch, "order_hash": self.order_hash}
            )


def _last_events(
    progress: Progress, operators: Operators, stored_bytes: float
) -> Iterator[dict[str, Any]]:
    """Yields the last events of a run folder. The loader may be gone by then, so it is no argument."""
    costs, others = operators.costs(), operators.others()
    if costs or others:
        yield {"kind": "operators", "loader": costs, "etl": others, "row_bytes": stored_bytes}
    yield {"kind": "end", **progress.outcome()}


def _form_named(name: str, order: Order, errors: Errors) -> Callable[[Batch], Any] | None:
    """Returns the function that gives a batch this form; None for `batch`. Refuses a form without weights where weights
    are needed."""
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


def _report_skipped_rows(table: str, plan: RowsPlan) -> None:
    if plan.dropped > _NOTABLE * plan.rows:
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
