"""The functions of Petastorm, for its users: `make_batch_reader` and `make_spark_converter`.

    from sluice.petastorm import make_batch_reader

    with make_batch_reader("file:///data/clicks", schema_fields=["user", "label"], num_epochs=3) as reader:
        for batch in reader:
            ...  # named tuples of arrays, a row group each

The result has the interface of Petastorm's Reader. Sluice loads the row groups: it tunes the reader while it runs
(`reader.tuning`), and the order depends only on files, seed and epoch. A reader can be resumed (`state_dict`). Options
that have no meaning here are refused by name. Import this module before petastorm, as it
adapts petastorm to current Arrow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NoReturn, ParamSpec, Self, TypeVar
from urllib.parse import unquote

from sluice.agent.report.run_folder import start_or_resume
from sluice.agent.tunable import Policy
from sluice.agent.tuning import TunedRun, TuningStatus, policy_of
from sluice.etl.schema import DataFile
from sluice.etl.table.table_columns import FileColumns, partitions_of
from sluice.ingest.flow.decoded import Decoded
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import Machine
from sluice.ingest.progress import Progress
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.kept_files import first_schema
from sluice.ingest.read.petastorm import compat
from sluice.ingest.read.petastorm.options import (
    PetastormError,
    PetastormOptions,
    check_names,
    unischema_of,
)
from sluice.ingest.read.petastorm.row_groups import RowGroupOrder, RowGroupStage, rows_of
from sluice.ingest.read.petastorm.source import PetastormSource
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.read.source_files import find_files

compat.install()

from petastorm.ngram import NGram  # noqa: E402
from petastorm.transform import TransformSpec, edit_field  # noqa: E402

__all__ = [
    "BatchReader",
    "PetastormOptions",
    "TransformSpec",
    "edit_field",
    "make_batch_reader",
    "make_reader",
    "make_spark_converter",
]

_WORKERS = 10
_NO_CACHE = "take no cache"
_FILES = "files are opened by Arrow and fsspec, by their URLs"
_FILTER = "take a predicate, or give the list of files"
_MEANINGLESS = {
    "shuffle_row_drop_partitions": "rows are shuffled whole, by shuffle_rows",
    "results_queue_size": "read-ahead is limited in bytes (knobs, memory_limit), and tuned",
    "rowgroup_selector": _FILTER,
    "shard_seed": "take seed",
    "cache_type": "Petastorm's cache unpickles files; take none",
    "cache_location": _NO_CACHE,
    "cache_size_limit": _NO_CACHE,
    "cache_row_size_estimate": _NO_CACHE,
    "cache_extra_settings": _NO_CACHE,
    "reader_pool_type": "threads decode, with 'dummy' one; for Python in processes take transforms of sluice.Loader",
    "hdfs_driver": _FILES,
    "filters": _FILTER,
    "storage_options": "put them after the URL, as in s3://bucket/file?region=eu-west-1",
    "zmq_copy_buffers": "no batch goes through a socket",
    "filesystem": _FILES,
}
"""The options that accept only their default, and what to do instead."""
_ALSO_ACCEPTED = {"cache_type": None, "reader_pool_type": "dummy"}
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def make_reader(*_given: Any, **_options: Any) -> NoReturn:
    """Refuses Petastorm's row API. Its schema is a pickle in the dataset, and Sluice unpickles nothing."""
    raise PetastormError(
        "make_reader: Sluice reads no rows one by one, and no dataset whose schema is pickled in _common_metadata. For "
        "plain Parquet, take make_batch_reader, or sluice.Loader(…, as_='pandas') and frame.itertuples(). Write a "
        "dataset with Petastorm's codecs as plain Parquet first"
    )


def _refuses_meaningless(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Makes a function refuse arguments that have no meaning here, unless they are the default."""
    usual = signature(make)

    @wraps(make)
    def checked(*args: _Given.args, **named: _Given.kwargs) -> _Made:
        for name, value in usual.bind(*args, **named).arguments.items():
            default = usual.parameters[name].default
            if name in _MEANINGLESS and value not in (default, _ALSO_ACCEPTED.get(name, default)):
                raise PetastormError(
                    f"make_batch_reader: {name}={value!r} has no meaning here: {_MEANINGLESS[name]}"
                )
        return make(*args, **named)

    return checked


@_refuses_meaningless
def make_batch_reader(  # noqa: PLR0917
    dataset_url_or_urls: str | Sequence[str],
    schema_fields: Sequence[str] | None = None,
    reader_pool_type: str = "thread",
    workers_count: int = _WORKERS,
    results_queue_size: int = 50,
    seed: int | None = None,
    shuffle_rows: bool = False,
    shuffle_row_groups: bool = True,
    shuffle_row_drop_partitions: int = 1,
    predicate: Any = None,
    rowgroup_selector: Any = None,
    num_epochs: int | None = 1,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    shard_seed: int | None = None,
    cache_type: str | None = "null",
    cache_location: str | None = None,
    cache_size_limit: int | None = None,
    cache_row_size_estimate: int | None = None,
    cache_extra_settings: Any = None,
    hdfs_driver: str = "libhdfs3",
    transform_spec: Any = None,
    filters: Any = None,
    storage_options: Any = None,
    zmq_copy_buffers: bool = True,
    filesystem: Any = None,
    convert_early_to_numpy: bool = False,
    *,
    tuning: str | Policy = "auto",
    run_dir: str | os.PathLike[str] | None = None,
    memory_limit: int | None = None,
) -> BatchReader:
    """Reads a Parquet folder or files, one batch for each row group, as `petastorm.make_batch_reader` does.

    The tuning begins with `workers_count` workers. `reader_pool_type="dummy"` is one, without tuning. `seed` None is 0.
    `convert_early_to_numpy` changes nothing. `tuning`, `run_dir`, `memory_limit`: see `sluice.Loader`."""
    PetastormOptions(predicate=predicate)  # refuses another kind of object
    groups = _open_groups(dataset_url_or_urls, schema_fields, transform_spec, predicate)
    shard = shard_count, cur_shard, seed
    source = PetastormSource(groups, predicate, gives_arrays=True, spec=transform_spec, shard=shard)
    dummy = reader_pool_type == "dummy"
    return BatchReader(
        groups,
        source,
        RowGroupOrder(
            groups=source.row_groups,
            seed=seed or 0,
            shuffle_groups=shuffle_row_groups,
            shuffle_rows=shuffle_rows,
        ),
        num_epochs=num_epochs,
        tuning="fixed" if dummy else tuning,
        workers=1 if dummy else workers_count,
        run_dir=run_dir,
        memory_limit=memory_limit,
    )


def _open_groups(
    urls: str | Sequence[str], wanted: Sequence[str] | None, transform_spec: Any, predicate: Any
) -> RowGroupReader:
    """Opens the wanted columns of the files. Refuses columns that the files, or the options, do not have."""
    if isinstance(wanted, NGram):
        raise PetastormError(
            "make_batch_reader: schema_fields is an NGram, of make_reader of Petastorm. For sequences, take "
            "sluice.Loader(…, history=History(…)), or a job with [[history]] or [[lag]] in its spec (docs/features.md)"
        )
    (files, folders), opened = _files(urls), FileOpener()
    stored = first_schema(files, opened, folders)
    schema = unischema_of(stored)
    view = schema.create_schema_view(list(wanted)) if wanted is not None else schema
    names = [name for name in stored.names if name in view.fields]
    if not names:
        raise RuntimeError(
            f"No fields matching the criteria '{wanted}' were found in the dataset {urls}."
        )
    if transform_spec is not None:
        check_names(transform_spec, names)
    if predicate is not None and (lacking := sorted(set(predicate.get_fields()) - set(names))):
        raise PetastormError(
            f"predicate: no column {lacking[0]!r} is read; name it in schema_fields"
        )
    return RowGroupReader(
        files,
        names,
        opened=opened,
        located=folders,
        is_filtered=True,
    )


def _files(urls: str | Sequence[str]) -> tuple[list[DataFile], list[FileColumns]]:
    """Returns the files, and the columns in the names of their folders (`day=3`)."""
    paths: list[str] = []
    for url in [urls] if isinstance(urls, str) else urls:
        if "://" not in url:
            raise PetastormError(f"{url}: write a URL, for instance file://{os.path.abspath(url)}")
        path = unquote(url.removeprefix("file://"))
        source = None if "://" in path else find_files(path)
        if source and source.table:
            raise PetastormError(f"{url}: this is a {source.form} table; take sluice.Loader")
        paths += source.paths if source else [path]
    sizes = (0 if "://" in path else os.path.getsize(path) for path in paths)
    files = [
        DataFile(path=path, rows=0, bytes=size) for path, size in zip(paths, sizes, strict=True)
    ]
    return files, partitions_of(paths)


class BatchReader:
    """A reader with the interface of `petastorm.reader.Reader`, with an exact order, tuned and resumable."""

    batched_output = is_batched_reader = True
    ngram = None

    def __init__(
        self,
        groups: RowGroupReader,
        source: PetastormSource,
        order: RowGroupOrder,
        *,
        num_epochs: int | None,
        tuning: str | Policy,
        workers: int,
        run_dir: str | os.PathLike[str] | None,
        memory_limit: int | None,
    ):
        if num_epochs is not None and num_epochs < 1:
            raise ValueError(f"num_epochs: {num_epochs} is not a positive number")
        policy = policy_of(tuning)
        self.num_epochs = num_epochs
        self._groups = groups
        self._order = order
        self.schema = source.schema
        """The Unischema of the batches."""
        self._row_groups = RowGroupStage(
            groups, source, order, machine=Machine(), memory_limit=memory_limit, workers=workers
        )
        self._progress = Progress(self._row_groups, memory_limit)
        self._epoch = self._number = self._first = 0
        self._run: Iterator[Decoded] | None = None
        self.last_row_consumed = self.stopped = False
        folder = None
        if run_dir is not None:
            config = {
                "kind": "load",
                "data": groups.files[0].path,
                "version": order.digest,
                "tuning": policy.name,
                "reader": source.name,
                "seed": order.seed,
                "knobs": self._row_groups.knobs.to_dict(),
            }
            folder = start_or_resume(run_dir, config)
        self._tuned = TunedRun(
            self._progress,
            policy,
            folder=folder,
            outcome=self._progress.outcome,
        )

    # ---- batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self.stopped:
            raise RuntimeError(
                "Trying to read a sample after this reader has stopped: its with block was left, or "
                "stop() was called"
            )
        if self._run is None:
            end = None if self.num_epochs is None else self._first + self.num_epochs
            self._run = self._row_groups.start(self._epoch, self._number, end)
            self._tuned.start()
        self._progress.enter("wait")
        try:
            decoded = next(self._run)
        except StopIteration:
            self.last_row_consumed = True
            self._progress.enter("away")
            raise
        columns, epoch = decoded.rows, decoded.task.schedule.epoch
        decoded.release()
        self._progress.count(rows_of(columns))
        self._number = self._number + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        self._progress.enter("compute")
        return self.schema.make_namedtuple(**columns)

    next = __next__

    def reset(self) -> None:
        """Begins the next epochs. All row groups of the epochs before must have been consumed."""
        if not self.last_row_consumed:
            raise NotImplementedError(
                "Currently do not support resetting a reader while in the middle of iteration. "
                "You can call reset only after all samples were consumed."
            )
        self._epoch += 1
        self._first = self._epoch
        self._number = 0
        self._run, self.last_row_consumed = None, False

    # ---- position and tuning

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next row group, for JSON."""
        return self._order.state(self._epoch, self._number)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from this position. Raises if the state belongs to another order of row groups."""
        self._epoch, self._number = self._order.position(state)
        self._row_groups.stop()
        self._run, self.last_row_consumed = None, False

    @property
    def tuning(self) -> TuningStatus:
        """What the agent does and why: a sentence when printed."""
        return self._tuned.status

    @property
    def knobs(self) -> Knobs:
        return self._row_groups.knobs

    def apply(self, knobs: Knobs) -> None:
        """Changes the knobs while running. The order stays the same. The agent no longer changes them."""
        self._tuned.turn(knobs)

    @property
    def diagnostics(self) -> dict[str, Any]:
        return {"output_queue_size": self._row_groups.stats()[0].queue_bytes}

    # ---- the end

    def stop(self) -> None:
        """Stops the agent and the workers. A second call does nothing."""
        if not self.stopped:
            self.stopped = True
            try:
                self._tuned.close()
            finally:
                self._groups.interrupt()
                self._row_groups.stop()
                self._groups.close()

    def join(self) -> None:
        """Does nothing, because `stop` has waited. Petastorm's users call it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._tuned.failed(error[1])
        self.stop()


# ---- Spark


def make_spark_converter(
    df: Any,
    parquet_row_group_size_bytes: int = 32 * 2**20,
    compression_codec: str | None = None,
    dtype: str | None = "float32",
) -> Any:
    """Returns the converter of `petastorm.spark.make_spark_converter`. Spark writes the frame as Parquet. The
    converter's datasets and DataLoaders read by this module's `make_batch_reader` and take its options. Petastorm
    converts and caches. Its `shuffling_queue_capacity` draws without a seed; `shuffle_rows` keeps the order exact."""
    compat.install_local_files()
    from petastorm.spark import spark_dataset_converter

    if spark_dataset_converter.make_batch_reader.__module__ == "petastorm.reader":
        spark_dataset_converter.make_batch_reader = make_batch_reader
    return spark_dataset_converter.make_spark_converter(
        df, parquet_row_group_size_bytes, compression_codec, dtype
    )
