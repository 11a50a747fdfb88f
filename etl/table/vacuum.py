"""`vacuum` removes the data, fitted states, rejects and job records that no kept version needs.

It removes only files that a job of this table wrote inside the table's own folder. It follows no link.
"""

from __future__ import annotations

import datetime
import errno
import re
from dataclasses import dataclass

from sluice.common.stores import StoreError
from sluice.etl.table.pins import announce_removal, needed_files, pins, removals
from sluice.etl.table.store import TableStore, job_of
from sluice.etl.table.table import FeatureTable, LostVersion, TableError, Unreadable

DAY_S = 86_400.0
JOB = r"\d{8}T\d{6}-[0-9a-f]+"
_DRAFT = r"\.[0-9a-f]{8,32}\.draft"
_WRITTEN = {  # Parquet and JSON files of jobs, Hadoop's checksums of them, and drafts of them
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
    """What is kept in the folders of jobs: links, and files that no job of this table wrote."""


def vacuum(
    store: TableStore,
    *,
    keep: int,
    now: float,
    dry_run: bool = False,
    grace_s: float = DAY_S,
    at_once: frozenset[str] = frozenset(),
) -> Vacuumed:
    """Keeps all files of the newest `keep` versions and of the pinned versions. Removes files of other versions that
    are older than `grace_s`. So a running job, or a version about to be pinned, loses nothing. The other versions stay
    in the log, but can no longer be read. Files of the jobs and states `at_once` are removed at any age."""
    newest = FeatureTable.open(store.uri).version
    if links := store.listed("_delta_log")[1]:
        raise StoreError(
            f"{store.url(links[0])}: is a link, so what this table needs is written elsewhere; nothing "
            "was removed; put the log's own files in its place"
        )
    pinned = {pin.version for pin in pins(store, now)}
    kept = {*range(max(0, newest - keep + 1), newest + 1), *pinned}
    needed: set[str] = set()
    for version in kept:
        needed |= _list_needed(store, version, is_pinned=version in pinned)
    unneeded, skipped = _list_unneeded(store, needed)
    gone = [p for p in unneeded if _owner(p) in at_once or _is_old(store, p, now, grace_s)]
    # Records are removed last. While a record exists, a reader's error can name the job that made a removed file.
    gone.sort(key=lambda p: (p.startswith("_sluice/jobs/"), p))
    earlier = removals(store)
    removal = None if dry_run or not gone else _announce(store, gone, needed)
    # A pin that was taken meanwhile may claim a file that is about to be removed.
    is_outdated = not {pin.version for pin in pins(store, now)} <= kept
    size = sum(store.size(p) or 0 for p in gone)
    if removal:
        if not is_outdated:
            became_links = _remove(store, gone)
            gone = [p for p in gone if p not in became_links]
            skipped |= became_links
        store.remove(removal)
    if is_outdated:
        return vacuum(store, keep=keep, now=now, dry_run=dry_run, grace_s=grace_s, at_once=at_once)
    if not dry_run:
        for path in earlier:  # of vacuums that were killed
            if now - store.modified(path) > DAY_S:
                store.remove(path)
    return Vacuumed(
        kept_versions=tuple(sorted(kept)),
        pinned=tuple(sorted(pinned)),
        files=tuple(gone),
        bytes=size,
        passed_over=tuple(sorted(skipped)),
    )


def _owner(path: str) -> str:
    """Returns the job or the state whose folder or record a file is in."""
    return path.split("/")[1 if path.startswith("data/") else 2].removesuffix(".json")


def _list_needed(store: TableStore, version: int, *, is_pinned: bool) -> set[str]:
    """Returns the files that a version needs. Returns none if an earlier vacuum has removed some of them. A pin of
    such a version keeps nothing: its reader sees that files are missing, and takes the pin back."""
    try:
        return needed_files(store, FeatureTable.open(store.uri, version))
    except LostVersion:
        return set()
    except TableError as error:
        if is_pinned or isinstance(error, Unreadable):
            raise
        return set()


def _list_unneeded(store: TableStore, needed: set[str]) -> tuple[list[str], set[str]]:
    """Returns the files of jobs that no kept version needs. Also returns the other files in the folders of jobs, which
    are not removed."""
    written: list[str] = []
    skipped: set[str] = set()
    for folder, names in _WRITTEN.items():
        paths, links = store.listed(folder)
        skipped.update(links)
        for path in paths:
            if path in needed:
                continue
            if names.fullmatch(path):
                written.append(path)
            elif "/." not in path.rpartition("/")[0]:  # of other programs
                skipped.add(path)
    return written, skipped


def _announce(store: TableStore, gone: list[str], needed: set[str]) -> str:
    """Warns readers of what will be removed. Returns the path of the warning."""
    try:
        return announce_removal(store, gone, needed)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise StoreError(
            f"{error.filename}: {error.strerror}, so readers cannot be warned of what will be removed; "
            "nothing was removed; put a folder in its place"
        ) from None


def _remove(store: TableStore, paths: list[str]) -> set[str]:
    """Removes files. Returns those that are kept because a folder of their path has become a link."""
    kept: set[str] = set()
    for path in paths:
        try:
            store.remove(path)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            kept.add(path)
        else:
            above = path.rpartition("/")[0]
            while above not in _WRITTEN and store.remove_if_empty(above):
                above = above.rpartition("/")[0]
    return kept


def _is_old(store: TableStore, path: str, now: float, grace_s: float) -> bool:
    """Returns whether a file, and the job that wrote it, are older than `grace_s`. A job's name begins with the time of
    its start. A file may be older than its times say, never younger."""
    if now - store.modified(path) <= grace_s:
        return False
    job = job_of(path) or path.rsplit("/", 1)[-1]
    try:
        began = datetime.datetime.strptime(job[:15], "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return True
    return now - began.timestamp() > grace_s
