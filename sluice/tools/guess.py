"""`sluice guess FILES`: writes a spec for plain Parquet or text logs, as a start to edit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.settings import parse, setting

_EXAMPLES = """\
examples:
  sluice guess 'logs/*.parquet' > clicks.toml
  sluice guess logs --label 'stars >= 4' --out clicks.toml
  sluice bench logs --spec clicks.toml
  sluice guess 'exports/*.csv' --label bought > exports.toml
"""
_DESCRIPTION = """Reads footers and a few rows, and writes a spec: the columns with their roles, types and
operators, and the splits. A comment describes the values of each column. For CSV, TSV and JSON lines
it also finds encoding, delimiter and header. Pass the spec to sluice etl as --spec. For Parquet you
can also pass it to a Loader as spec=."""


@dataclass(frozen=True, kw_only=True)
class GuessOptions:
    """The files, and where the spec is written."""

    files: tuple[str, ...] = setting(
        help="a folder, glob or files of Parquet, CSV, TSV or JSON lines",
        metavar="FILES",
        positional=True,
        several=True,
    )
    label: str | None = setting(
        None,
        "the column that is the label, or a comparison such as 'stars >= 4' (default: "
        "guessed by its name)",
        metavar="NAME",
    )
    exclude: tuple[str, ...] = setting(
        (), "a column to leave out; may be repeated", metavar="NAME", again=True
    )
    out: str = setting("", "a new file for the spec (default: it is printed)", metavar="FILE")


def main(argv: list[str]) -> None:
    options = parse(GuessOptions, argv, "sluice guess", epilog=_EXAMPLES, description=_DESCRIPTION)
    from sluice.etl.spec.spec import Spec
    from sluice.ingest.read.parquet_files import ParquetFiles
    from sluice.tools.guess_spec import TWO_READINGS, guessed_spec

    files = options.files if len(options.files) > 1 else options.files[0]
    text = guessed_spec(files, options.label, options.exclude)
    for line in text.splitlines():
        if line.startswith(TWO_READINGS):
            say(f"sluice: {line.removeprefix('# ')}")
    # Refuses what a loader would refuse. Its notes are not printed, because the spec has them as comments.
    if (spec := Spec.own(text, "the guessed spec")).input.format in ("parquet", "delta", "iceberg"):
        ParquetFiles.open(files, spec=spec, say=lambda _: None)
    if not options.out:
        print(text, end="")
        return
    try:
        with Path(options.out).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}; name a new file") from None
    say(f"sluice: wrote {options.out}. Read it, and change what is wrong.")
