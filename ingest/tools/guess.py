"""Looks at plain Parquet, or at logs in lines of text, and writes a spec for them, to edit: `sluice guess FILES`."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from sluice.etl.common.errors import UsageError
from sluice.etl.common.settings import parse, setting
from sluice.etl.spec.spec import Spec
from sluice.ingest.plain.guess import proposals
from sluice.ingest.plain.text_logs import TextSample, text_paths
from sluice.ingest.read.parquet_files import ParquetFiles, Paths, facts_of
from sluice.ingest.tools.spec_text import spec_text

_EXAMPLES = """\
examples:
  sluice guess 'logs/*.parquet' > clicks.toml
  sluice guess logs --label 'stars >= 4' --out clicks.toml
  sluice bench logs --spec clicks.toml
  sluice guess 'exports/*.csv' --label bought > exports.toml
"""
_DESCRIPTION = ("Reads footers and a few rows, and writes a spec: roles, types, what is hashed, filled or made of "
                "times, and how rows are split, with what was seen of each column beside it; of CSV, TSV and JSON "
                "lines also encoding, delimiter and header. sluice etl takes it as --spec, and of Parquet a Loader as "
                "spec=.")


@dataclass(frozen=True, kw_only=True)
class GuessOptions:
    """Which files, and where the spec goes."""

    files: tuple[str, ...] = setting(help="a folder, glob or files of Parquet, CSV, TSV or JSON lines",
                                     metavar="FILES", positional=True, several=True)
    label: str | None = setting(None, "the column that is the label, or a comparison such as 'stars >= 4' (default: "
                                      "guessed by its name)", metavar="NAME")
    out: str = setting("", "a new file for the spec (default: it is printed)", metavar="FILE")


def guessed_spec(source: Paths, label: str | None = None) -> str:
    """A spec for these files, as TOML: what `ParquetFiles.open` would guess, and more that a spec can say."""
    if not (paths := text_paths(source)):
        facts, rows, others = facts_of(source)
        return spec_text(proposals(facts, rows, label, is_click=True), others)
    sample = TextSample.of(paths)
    with tempfile.TemporaryDirectory(prefix="sluice-guess-") as folder:
        pq.write_table(sample.table, f"{folder}/rows.parquet", row_group_size=-(-sample.table.num_rows // 2))
        facts, _, others = facts_of(f"{folder}/rows.parquet")
    found = proposals(facts, sample.rows, label or sample.label, is_click=True)
    return spec_text(found, {**others, **sample.others}, sample)


def main(argv: list[str]) -> None:
    options = parse(GuessOptions, argv=argv, prog="sluice guess", epilog=_EXAMPLES, description=_DESCRIPTION)
    files = options.files if len(options.files) > 1 else options.files[0]
    text = guessed_spec(files, options.label)
    # Whoever takes it does this, too; what is left out stands in the spec.
    if (spec := Spec.own(text, "the guessed spec")).input.format == "parquet":
        ParquetFiles.open(files, spec=spec, say=lambda _: None)
    if not options.out:
        print(text, end="")
        return
    try:
        with Path(options.out).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}; name a new file") from None
    print(f"sluice: {options.out} is written: read it, and change what is wrong", file=sys.stderr)
