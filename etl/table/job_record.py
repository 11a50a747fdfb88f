"""`JobRecord`, which is stored in `_sluice/jobs/<job>.json`, and its `FileRecord`s. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sluice.etl.schema import BagSizes
from sluice.etl.spec.row_identity import Identity

FORMAT = 1
RULES = 2
"""The version of the rules that keep a row's label out of its features. In version 1 a fold could depend on the label,
and rows of one moment saw each other in the order of the input's columns."""
MORE = 0.05
"""A column gets a warning if its share of lost values rises by more than this."""


class RecordError(ValueError):
    """A job record that cannot be read. The message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One Parquet file at the time when it was published."""

    path: str
    """The file's path relative to the table: `data/<job>/split=<split>/<name>.parquet`."""
    rows: int
    bytes: int
    split: str
    row_group_rows: tuple[int, ...]
    sha256: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileRecord:
        # Release 0.2 wrote `partition`.
        known = {name: entry for name, entry in value.items() if name != "partition"}
        return cls(**{**known, "row_group_rows": tuple(value["row_group_rows"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job: everything that readers of its version need and the Delta log cannot hold."""

    job: str
    mode: str
    version: int
    """The version of the job's commit. The Delta log shows whether the commit landed."""
    at: str
    rows: int
    state: str | None
    """The hash of the fitted state. None if nothing was fitted."""
    parent: str | None
    """The hash of the state of the version before."""
    spec: str
    """The spec's text."""
    seed: int
    cardinalities: Mapping[str, int]
    files: tuple[FileRecord, ...]
    rejected: Mapping[str, int] = field(default_factory=dict)
    bags: Mapping[str, BagSizes] = field(default_factory=dict)
    profile: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The profile of its columns: see `sluice.etl.table.profile.Profile`."""
    raw_nulls: Mapping[str, float] = field(default_factory=dict)
    """The share of missing values in each input column."""
    unread: Mapping[str, float] = field(default_factory=dict)
    """The share of values that an operator could not read, in each column with such operators."""
    drift: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The drift of its columns against the version before."""

    tails: bool = False
    """Whether `_sluice/serving/<job>` holds the newest values of its histories and side tables."""
    identity: Identity | None = None
    """The rule by which its rows are recognised. None if it was made without a spec."""
    engine: str | None = None
    """The engine, `spark` or `local`. It does not change the files. None if they were made without a job."""
    inputs: Mapping[str, int] = field(default_factory=dict)
    """The version of each Delta or Iceberg table that the job has read."""
    layout: str = "size"
    """How its files store numbers (`TableSpec.layout`). Before release 0.3 there was only `size`."""
    sketches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    """`Identity.recognition` → split → sketch of its rows: see `sluice.etl.table.sketch.Sketch`."""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "rules": RULES, **asdict(self)}

    @classmethod
    def from_json(cls, value: Any) -> JobRecord:
        try:
            if value["format"] != FORMAT or (value["spec"] and value.get("rules") != RULES):
                raise RecordError(
                    f"it is of format {value['format']}, rules {value.get('rules')}, and this program "
                    f"reads format {FORMAT}, rules {RULES}: another version of sluice wrote it; make the "
                    "table anew from its input"
                )
            # Release 0.2 wrote `took`, the cost of the job.
            known = {k: v for k, v in value.items() if k not in ("format", "rules", "took")}
            files = tuple(FileRecord.from_json(f) for f in known["files"])
            identity = Identity.from_json(rule) if (rule := known.get("identity")) else None
            return cls(
                **{
                    **known,
                    "files": files,
                    "bags": {k: tuple(v) for k, v in known["bags"].items()},
                    "identity": identity,
                    "unread": known["unread"] or {},
                }
            )
        except RecordError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RecordError(f"a part of it is missing or of another type: {error}") from None


def shares(missing: Mapping[str, float], unread: Mapping[str, float]) -> dict[str, float]:
    """Returns each column's share of values that are missing or cannot be read."""
    return {name: missing.get(name, 0.0) + unread.get(name, 0.0) for name in [*missing, *unread]}
