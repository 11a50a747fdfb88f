"""What `sluice etl` makes of drawn specs and rows with the local engine, and what a loader makes of these tables."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sluice import Errors, Loader, Order
from tests.frozen import clicks
from tests.frozen.commands import CommandFailed, call
from tests.frozen.digest import digest, key_paths, read_lines
from tests.frozen.loading import bytes_of
from tests.fuzz.drawn_specs import MODULE, drawn
from tests.product import UsageError

SEEDS = range(200, 212)
JOB = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")
REFUSED = "refused"


def record(folder: Path) -> dict[str, Any]:
    """Makes two tables of each seed: one with all operators applied, and one that leaves some to the loader."""
    by_seed: dict[str, Any] = {}
    for seed in SEEDS:
        with _inside(folder / str(seed)) as here:
            case = drawn(seed, Path())
            rows = case.write()
            by_seed[f"seed {seed}"] = {
                "drawn": digest(case.etl(), case.loader(), rows.read_bytes())
            }
            for name, spec in (("whole", case.etl()), ("left", case.loader())):
                (here / f"{name}.toml").write_text(spec)
                by_seed[f"seed {seed}"][name] = _table_of(here, name, rows.name, list(case.inputs))
    return {"drawn": by_seed, "versions": _versions(folder / "versions")}


def _versions(folder: Path) -> dict[str, Any]:
    """Makes four versions of one table, and returns each of them with what the commands for tables tell of it."""
    table = clicks.make_table(folder, count=400)
    later = folder / "later.json"
    rows = "".join(f"{json.dumps(row)}\n" for row in clicks.rows(200, seed=4))
    later.write_text(rows.replace('"shop": "s1', '"shop": "new 1'))
    versions: dict[str, Any] = {"created": _newest(table, set())}
    for words in (("append",), ("append", "--update-state"), ("overwrite", "--refit")):
        before = set(table.rglob("*.parquet"))
        told = call(
            "etl",
            "--engine",
            "local",
            "--spec",
            folder / "spec.toml",
            "--input",
            later,
            "--output",
            table,
            "--mode",
            *words,
        )
        versions[" ".join(words)] = {"told": key_paths([told]), **_newest(table, before)}
    for verb, words in (("show", ()), ("check", ()), ("vacuum", ("--keep", 1, "--dry-run"))):
        versions[verb] = key_paths([call(verb, table, *words)])
    return versions


def _newest(table: Path, before: set[Path]) -> dict[str, Any]:
    with Loader(str(table), batch_size=32, order=Order(last="pad"), tuning="fixed") as loader:
        batches = digest(*map(bytes_of, loader))
    return {"batches": batches, **_files(table, set(table.rglob("*.parquet")) - before)}


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[Path]:
    """Makes a folder and works in it, so that specs name their files by relative paths."""
    folder.mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield Path()
    finally:
        os.chdir(before)


def _table_of(here: Path, name: str, rows: str, columns: list[str]) -> Any:
    try:
        told = call(
            "etl",
            "--engine",
            "local",
            "--spec",
            f"{name}.toml",
            "--input",
            rows,
            "--output",
            name,
            "--rejects",
            f"{name}.rejects",
            "--max-rejects",
            1,
            "--accept-nulls",
            *columns,
        )
    except CommandFailed as error:
        if not isinstance(error.__cause__, UsageError):
            raise
        return REFUSED
    shown = {key: told[key] for key in ("rows_in", "rows_out", "splits", "version", "fingerprint")}
    return {
        "told": json.dumps(shown, sort_keys=True),
        "rejected": sorted(told["rejected"].values()),
        "rejects": _rejects(here / f"{name}.rejects"),
        "batches": _batches(name),
        **_files(here / name, (here / name).rglob("*.parquet")),
    }


def _files(table: Path, files_of: Iterable[Path]) -> dict[str, Any]:
    """Returns files of a table with their row groups, and hashes of their types, values and bytes."""
    paths = sorted(files_of)
    files = [pq.ParquetFile(path) for path in paths]
    contents = [file.read() for file in files]
    groups = [
        [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] for file in files
    ]
    names = [JOB.sub("JOB", str(path.relative_to(table))) for path in paths]
    return {
        "files": [f"{name} {of_file}" for name, of_file in zip(names, groups, strict=True)],
        "types": digest(*(str(content.schema) for content in contents)),
        "values": digest(
            *(repr(column.to_pylist()) for content in contents for column in content.columns)
        ),
        "bytes": digest(*(path.read_bytes() for path in paths)),
    }


def _rejects(folder: Path) -> str:
    """Returns the hash of the rows that a job has rejected, without the texts of the reasons."""
    lines = [line for path in sorted(folder.rglob("*.json")) for line in read_lines(path)]
    return digest(*sorted([*line, str(line.get("line")), str(line.get("raw"))] for line in lines))


def _batches(table: str) -> dict[str, str]:
    """Loads each split of a table. Rows that no batch can hold are set aside."""
    batches = {}
    for split in sorted(path.name.partition("=")[2] for path in Path(table).glob("data/*/split=*")):
        errors = Errors(on_error="quarantine", max_rate=1.0, quarantine=f"{table}-{split}.jsonl")
        try:
            with Loader(
                table,
                split=split,
                batch_size=16,
                order=Order(last="pad"),
                errors=errors,
                tuning="fixed",
                allow_code=[MODULE],
            ) as loader:
                batches[split] = digest(
                    *map(bytes_of, loader), loader.quarantined["rows_set_aside"]
                )
        except UsageError:
            batches[split] = REFUSED
    return batches
