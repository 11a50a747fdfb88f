"""What a training loop imports: `Loader`, batches from Parquet by a pipeline that tunes itself."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self

from sluice.agent.report.beside import shown
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
from sluice.ingest.stages.batch import Ready
from sluice.ingest.stages.quarantine import Errors
from sluice.ingest.stages.table_operators import Operators
from sluice.ingest.stages.transform import UserTransform

if TYPE_CHECKING:
    from sluice.etl.spec.spec import Spec
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.parquet_files import Paths, Roles


_NOTABLE = 0.01  # the share of rows that are left out of an epoch from which on it is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order rows come. A state of another order is refused on resuming."""

    shuffle: bool = True
    """False: the rows as they lie."""
    last: str = "drop"
    """What becomes of rows that fill no batch at an epoch's end: `drop` leaves them out (others each time), `pad` fills
    the batch with rows of weight 0."""
    window_rows: int | None = None
    """The rows of a stream that are mixed with each other; None: 32,768. More: better mixed, more memory."""
    streams: int | None = None
    """The parts of an epoch of which every batch has rows; None: the largest power of two up to 8 that divides the
    batch size. Ranks share the same global batches if their number divides this, or is a multiple of it that divides
    the batch."""
    sample: str | None = None
    """A column of weights by which rows are drawn, with replacement; an epoch has as many rows as ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How files are read; all ways give the same rows."""

    reader: str | None = None
    """`petastorm` or `arrow`; None: Petastorm where it is installed, Arrow elsewhere."""
    files: FileOpener | None = field(default=None, repr=False)
    """Opens remote files with other retries, or a cache; it is closed with the loader."""
    packed: PackedCopy | None = None
    """Keeps a packed copy of the row groups of local files, from which they are decoded much faster; None: no copy."""
    petastorm: PetastormOptions = PetastormOptions()
    """What Petastorm's Reader is asked for besides: a predicate, a selector of row groups, a schema, a cache."""


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

    The rows of an epoch and their order depend on the files, `seed` and the epoch alone, whatever is tuned. Each
    `iter()` is one epoch; an epoch that was broken off is not resumed, the next `iter()` begins the next one. To torch
    it is an IterableDataset of whole batches: `DataLoader(loader, batch_size=None)` gives the same, from this process.

    The agent is a thread that looks once a second. It begins with the first batch and ends with the loader, however
    that ends: `close`, `with`, garbage collection or the interpreter's exit. Between ranks nothing is agreed on, as the
    order does not depend on the knobs: each rank tunes its own loader, within its part of the host's cores and memory
    (torchrun's LOCAL_WORLD_SIZE; without it all `ranks` are taken to be on this host). `dlrm.train` has one agent for
    all ranks of a host.
    """

    def __new__(cls, *_source: Any, **given: Any) -> Self:
        """Says which argument may have been meant by one that there is not, as Python does not."""
        known = signature(cls.__init__).parameters
        for name in given.keys() - known.keys():
            raise TypeError(f"{cls.__name__} has no argument {name!r}{nearest(name, known)}")
        for name, value in given.items():
            kind, example = _KINDS.get(name, (object, ""))
            if not (value is None or isinstance(value, kind)):
                raise LoaderError(
                    f"{name}={value!r} is of another kind than it takes; write for instance "
                    f"{name}={example}"
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
        `tuning` is `auto`, the best policy there is, or `planner`, one by its name; `shadow`, which only says what it
        would do; `fixed`; or a policy of your own. Without a word it is `auto`, for nobody should have to ask for what
        costs next to nothing and changes no row; who gives `knobs` has chosen, so with them it is `fixed`. `fixed`
        without `knobs` is one worker a stage. Whoever calls `apply` has the knobs from then on: the agent leaves them
        alone.
        `run_dir` is a new folder for what was measured and decided, with a report.html at the end; `sluice explain`
        tells it. Without it nothing is written. Of several ranks the first one writes.
        `live` is a port of 127.0.0.1 on which that report is shown while it grows; 0: any that is free.
        `transforms` are functions over a batch as a dict of numpy arrays (`sluice.ingest.stages.transform.Transform`),
        given bare, as `module:function`, or with a name. A function of a module may also run in processes, which import
        it afresh; a notebook's, a closure or a lambda, or one given with a name, runs in threads only. What no other
        process could import is recorded as code without a name: a resumed run must be given it again, and nobody can
        tell whether it still does the same.
        `roles` says what the columns of plain Parquet are, as {"label": "click", "dense": ["I*"], …} or as
        "label=click;dense=I*;sparse=user%1000000"; without it they are guessed, and printed once.
        `hash` makes ids of whole numbers or texts: {"user": 1_000_000} spreads the values over so many ids, from 2 on,
        exactly as the operator `hash` of a feature table does; 1 is for missing values.
        `spec` says all that of plain Parquet instead, and how rows are split: a file such as `sluice guess` writes,
        which `sluice etl --spec` takes as well.
        `fill` replaces a missing number, for all columns or by name.
        `read_ahead_epochs` limits how many epochs are read without a pause between them, not how many you may ask for.
        `epochs` is its old name, which works with a warning.
        `memory_limit` is for the whole process tree, in bytes or as "2GiB", and never more than the machine's.
        `as_` is what `iter()` gives: `batch`; `dict`, tensors by column name; `numpy`, arrays by column name; `pandas`,
        a frame; or `kjt`, TorchRec's own batch, which has no weights. All but the frame are views.
        `workers` has others read and shuffle row groups, with the same rows in the same order: `local:4` starts so many
        processes on this host, `ray://HOST:PORT` has a Ray cluster place them, and `HOST:PORT,…?token=FILE` asks those
        that `sluice worker` runs elsewhere.
        `knobs` is where the knobs start. `allow_code` names the modules whose functions a table's spec may have
        imported when they must run (`sluice.etl.spec.permission`)."""
        if epochs is not None:
            warnings.warn(
                "Loader(epochs=…) is now Loader(read_ahead_epochs=…): it limits how far is read ahead, not "
                "the number of epochs",
                FutureWarning,
                stacklevel=2,
            )
            read_ahead_epochs = epochs
        if as_ not in FORMS:
            raise LoaderError(
                f"as_={as_!r} is none of {', '.join(FORMS)}{nearest(str(as_), FORMS)}"
            )
        if as_ == "kjt" and errors.on_error == "quarantine":
            raise LoaderError(
                "as_='kjt' gives batches without weights, and errors.on_error='quarantine' needs them "
                "for rows that are set aside. Take on_error='raise', or as_='batch' and batch.kjt()"
            )
        if as_ == "kjt" and order.last == "pad":
            raise LoaderError(
                "as_='kjt' gives batches without weights, and order.last='pad' needs them: a row that "
                "only fills a batch has weight 0. Take last='drop', or as_='batch' and batch.kjt()"
            )
        if live is not None and run_dir is None:
            raise LoaderError(
                f"live={live} without run_dir: the page is that of a run folder; name one with run_dir"
            )
        self._form = FORMS[as_]
        self._page = ExitStack()
        memory_limit = None if memory_limit is None else parse_bytes(memory_limit)
        if tuning is None:
            tuning = "auto" if knobs is None else "fixed"
        policy = policy_of(tuning)
        table = table_of(
            source, roles, allow_code, hash, spec, transform_spec=without_spec(transforms)[1]
        )
        if as_ == "kjt" and (
            weight := next((f.name for f in table.fields if f.role == "weight"), None)
        ):
            raise LoaderError(
                f"as_='kjt' gives batches without weights, and column {weight!r} holds those of rows. "
                "Take as_='batch' and batch.kjt() with batch.weight, or leave the column out by roles="
            )
        sharers = _sharers(ranks)
        machine = SharedMachine(sharers) if sharers > 1 else Machine()
        if sharers > 1:
            share = machine.memory_limit() // sharers
            memory_limit = share if memory_limit is None else min(memory_limit, share)
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
        try:
            self._page.enter_context(
                shown(run_dir or "", None if rank else live, partial(print, file=sys.stderr))
            )
            if knobs is None and policy.name == "fixed":
                self._progress.apply(
                    Knobs(
                        workers={
                            **dict.fromkeys(self.limits.workers, 1),
                            **({"read": self.knobs.workers["read"]} if workers else {}),
                        }
                    )
                )
            folder = None
            if run_dir is not None and rank == 0:
                folder = RunFolder.create(
                    run_dir,
                    {
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
                        "transforms": {
                            name: code or "code without a name" for name, code in self._code.items()
                        },
                        "order": asdict(order),
                        "on_error": errors.on_error,
                        "memory_limit": memory_limit,
                        "knobs": self.knobs.to_dict(),
                    },
                )
        except BaseException:
            super().close()
            self._page.close()
            raise
        if self.plan.dropped > _NOTABLE * self.plan.rows and not rank:
            print(
                f"{table.uri}: {self.plan.dropped:,} of {self.plan.rows:,} rows fill no batch of {batch_size:,} and "
                "are left out of each epoch, other ones each time; order=Order(last='pad') has them all",
                file=sys.stderr,
            )
        self._tuned = TunedRun(
            self._progress,
            policy_of(tuning, foreknowledge(self)),
            folder=folder,
            last=_Ending(self._progress, self.operators, self.stored_bytes).events,
        )
        weakref.finalize(self, self._tuned.abandon).atexit = False

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        return batches if self._form is None else self._formed(batches)

    def _formed(self, batches: Iterator[Batch]) -> Iterator[Any]:
        """Yields batches in another form, and holds none that was given away: its memory is used again."""
        assert self._form is not None
        try:
            yield from map(self._form, batches)
        finally:
            batches.close()  # type: ignore[attr-defined] # an epoch is a generator

    @property
    def tuning(self) -> TuningStatus:
        """What the agent does and why: a sentence when printed, with the figures behind it as fields."""
        return self._tuned.status

    def apply(self, knobs: Knobs) -> None:
        """Turns the knobs while running; neither rows nor their order change. The agent leaves them alone from then
        on."""
        self._tuned.turn(knobs)

    def close(self) -> None:
        """Ends the agent and the pipeline, from any state; a second call does nothing."""
        aside, first = self.quarantined, not self._closed
        with self._page:
            try:
                self._tuned.close()
            finally:
                super().close()
        if first and aside["rows_set_aside"]:
            reasons = ", ".join(f"{reason}: {rows:,}" for reason, rows in aside["reasons"].items())
            print(
                f"{aside['rows_set_aside']:,} rows were set aside ({reasons}); {aside['file']} lists them",
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


class _Ending:
    """The last events of a run folder. It knows nothing of the loader, which may be gone by then."""

    def __init__(self, progress: Progress, operators: Operators, stored_bytes: float):
        self._progress = progress
        self._operators = operators
        self._stored_bytes = stored_bytes

    def events(self) -> Iterator[dict[str, Any]]:
        costs, others = self._operators.costs(), self._operators.others()
        if costs or others:
            yield {
                "kind": "operators",
                "loader": costs,
                "etl": others,
                "row_bytes": self._stored_bytes,
            }
        yield {"kind": "end", **self._progress.outcome()}


def _sharers(ranks: int) -> int:
    """How many ranks share this host: as torchrun says, or all of them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdigit() else ranks
