"""Removes what no kept version needs: `vacuum`. That is data, fitted states, rejects and records of jobs that nobody
can read any more.

Only what a job of this table wrote is removed, and only if it is in the table's own folder: no link is followed.
"""

from __future__ import annotations

import datetime
import errno
import re
from collections.abc import Callable
from dataclasses import dataclass

from sluice.etl.table.data_files import job_of
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.pins import Removal, pins, removals
from sluice.etl.table.store import StoreError, TableStore, folder_of_tails
from sluice.etl.table.table import DamagedRecord, FeatureTable, TableError

DAY_S = 86_400.0
JOB = r"\d{8}T\d{6}-[0-9a-f]+"
_DRAFT = r"\.[0-9a-f]{8,32}\.draft"
_WRITTEN = {  # what jobs write: Parquet and JSON files, Hadoop's checksums of them, and drafts of them
    folder: re.compile(f"{folder}/(?:{files})(?:{_DRAFT})?")
    for folder, files in (
        (
            "data",
            rf"{JOB}/(_temporary/.+|split=[^/]+/(partition=[^/]+/)?[^/]+\.parquet(\.crc)?|\.?_SUCCESS(\.crc)?)",
        ),
        (
            "_sluice/state",
            rf"([0-9a-f]{{16}}|{JOB})/([^/]+/)*(_temporary/.+|[^/]+\.parquet(\.crc)?|state\.json)",
        ),
        ("_sluice/serving", rf"{JOB}/[^/]+/(_temporary/.+|[^/]+\.parquet(\.crc)?)"),
        ("_sluice/jobs", rf"{JOB}\.json"),
        ("_sluice/rejects", rf"{JOB}/(_temporary/.+|[^/]+\.json(\.crc)?|\.?_SUCCESS(\.crc)?)"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacuumed:
    """What a vacuum removed, or would remove."""

    kept_versions: tuple[int, ...]
    pinned: tuple[int, ...]
    files: tuple[str, ...]
    bytes: int
    passed_over: tuple[str, ...] = ()
    """What was left alone although it is where jobs write: links, and files that no job of this table wrote."""


def vacuum(
    store: TableStore,
    *,
    keep: int,
    now: float,
    dry_run: bool = False,
    grace_s: float = DAY_S,
    forget: Callable[[str, str], object] = lambda _path, _table: None,
) -> Vacuumed:
    """Keeps the newest `keep` versions and the pinned ones whole; removes from the others what is older than `grace_s`,
    so that a job at work, or a version about to be pinned, loses nothing. `forget` is given each local Parquet file and
    the table's folder before the file goes, and removes what was derived from it.

    Versions stay in the log, but those not kept can no longer be read."""
    newest = FeatureTable.open(store.uri).version
    if links := store.listed("_delta_log")[1]:
        raise StoreError(
            f"{store.url(links[0])}: is a link, so what this table needs is written elsewhere; nothing "
            "was removed; put the log's own files in its place"
        )
    pinned = tuple(sorted({pin.version for pin in pins(store, now)}))
    kept = tuple(sorted({*range(max(0, newest - keep + 1), newest + 1), *pinned}))
    files: set[str] = set()
    for version in kept:
        try:
            table = FeatureTable.open(store.uri, version)
        except TableError as error:
            if version in pinned or isinstance(error, DamagedRecord):
                raise
            continue  # an earlier vacuum removed what this version needs
        files |= {f"_sluice/jobs/{job}.json" for job in table.records}
        files |= {store.relative(f.path) for f in table.files}
        files |= set(store.files(folder_of_tails(table.record.job))) if table.records else set()
        for state in {r.state for r in table.records.values() if r.state}:
            files |= FittedState.files(store, state)
    there: list[str] = []
    passed: list[str] = []
    for folder, written in _WRITTEN.items():
        found, links = store.listed(folder)
        there += [path for path in found if written.fullmatch(path)]
        passed += [
            *links,
            *(
                path
                for path in found
                if path not in files
                and not written.fullmatch(path)
                and "/." not in path.rpartition("/")[0]
            ),
        ]  # packed copies lie in hidden folders
    gone = [
        p
        for p in there
        if p not in files
        and now - store.modified(p) > grace_s
        and not _young(job_of(p) or p.rsplit("/", 1)[-1], now, grace_s)
    ]
    # Records go last: while one is there, a reader that looks for a file of its version can name the job that made it.
    gone.sort(key=lambda p: (p.startswith("_sluice/jobs/"), p))
    removal, before = Removal.of(gone, files), removals(store)
    removing = bool(gone) and not dry_run
    if removing:
        try:
            removal.begin(store)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise StoreError(
                f"{error.filename}: {error.strerror}, so readers cannot be warned of what will be removed; "
                "nothing was removed; put a folder in its place"
            ) from None
    # A pin taken meanwhile may claim what was about to go.
    if {pin.version for pin in pins(store, now)} - set(kept):
        if removing:
            removal.end(store)
        return vacuum(store, keep=keep, now=now, dry_run=dry_run, grace_s=grace_s, forget=forget)
    size = sum(store.size(p) or 0 for p in gone)
    for path in gone.copy() if not dry_run else ():
        try:
            if store.local and path.startswith("data/") and path.endswith(".parquet"):
                forget(store.path(path), store.root)
            store.remove(path)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            gone.remove(path)  # a folder of its path has just become a link
            passed.append(path)
            continue
        _sweep(store, path)
    if removing:
        removal.end(store)
    if not dry_run:
        for path in before:  # of vacuums that were killed
            if now - store.modified(path) > DAY_S:
                store.remove(path)
    return Vacuumed(
        kept_versions=kept,
        pinned=pinned,
        files=tuple(gone),
        bytes=size,
        passed_over=tuple(sorted(set(passed))),
    )


def _sweep(store: TableStore, path: str) -> None:
    """Removes the folders that a removed file leaves empty."""
    above = path.rpartition("/")[0]
    while above not in _WRITTEN and store.sweep(above):
        above = above.rpartition("/")[0]


def _young(job: str, now: float, grace_s: float) -> bool:
    """Whether a job may be younger than `grace_s`. Its name begins with when it began: its files may be older than they
    look, never younger."""
    try:
        began = datetime.datetime.strptime(job[:15], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return False
    return now - began.timestamp() <= grace_s
