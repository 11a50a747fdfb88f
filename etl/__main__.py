"""The commands `sluice synth | show | check | vacuum`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import FAILED, run, say
from sluice.etl.show import describe_table, draw_table
from sluice.etl.spec import code_options
from sluice.etl.synth.other_shapes import SHAPES, synthesize_shape
from sluice.etl.synth.raw_logs import FORMATS, synthesize
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable
from sluice.etl.table.vacuum import vacuum


def parser() -> argparse.ArgumentParser:
    described = ArgumentParser(
        prog="sluice", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Synthetic raw logs, and a look at feature tables. (`sluice etl` and etl/job.py make tables.)",
        epilog="examples:\n  sluice synth --rows 1000000 --seed 1 --out logs/clicks.tsv\n"
               "  sluice show table\n  sluice check table --version 3")
    commands = described.add_subparsers(dest="command", required=True)
    synth = commands.add_parser(
        "synth", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="write Criteo-shaped clicks whose best reachable AUC is known",
        description="Writes raw clicks in the shape of Criteo's logs: a label, 13 counts, 26 categories, no header. "
                    "Clicks are drawn from a planted model, so the last line can say the best AUC that any model can "
                    "reach (bayes_auc). The same seed and days give the same bytes.")
    synth.add_argument("--rows", type=_positive, required=True, help="how many")
    synth.add_argument("--seed", type=int, default=0, help="of everything random")
    synth.add_argument("--out", type=Path, required=True, metavar="PATH",
                       help="file to write; with --days above 1 a folder, which gets day_0, day_1, …")
    synth.add_argument("--format", choices=FORMATS, default="tsv", help="of what is written")
    synth.add_argument("--shape", choices=SHAPES, default="criteo",
                       help="of the rows; all but criteo are one file in the format of features/SHAPE.toml")
    synth.add_argument("--days", type=_positive, default=1,
                       help="files to spread the rows over; each later day brings values never seen before")
    for name, text in (("show", "say what a table holds"),
                       ("check", "look for missing, damaged and orphaned files and for ids out of range")):
        ends = " Ends with 1 if it finds any." if name == "check" else ""
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.{ends}")
        command.add_argument("table", metavar="TABLE", help="the table's folder or URI")
        command.add_argument("--version", type=int, help="an older version (default: the newest)")
        code_options.add_options(command)
    commands.choices["show"].add_argument("--html", type=Path, metavar="FILE", help="also draw it, in one file")
    commands.choices["show"].add_argument("--json", action="store_true",
                                          help="end with the JSON object on a terminal, too, as into a pipe or file")
    clean = commands.add_parser(
        "vacuum", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="remove the files that no kept or pinned version needs",
        description="Removes data, fitted states, rejects and records that neither the newest versions nor a pinned "
                    "one needs, if they are older than a day. Older versions can then no longer be read. Only what "
                    "jobs wrote goes; links are not followed, and what is passed over is named.")
    clean.add_argument("table", metavar="TABLE", help="the table's folder or URI")
    clean.add_argument("--keep", type=_positive, default=10, metavar="N", help="newest versions to keep whole")
    clean.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    return described


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def main(argv: list[str]) -> dict[str, Any] | None:
    args = parser().parse_args(argv)
    if args.command == "synth":
        return _synth(args)
    if args.command == "vacuum":
        return _vacuum(args)
    table = FeatureTable.open(args.table, args.version, allow_code=code_options.given(args))
    if args.command == "show":
        say(describe_table(table))
        if args.html is not None:
            args.html.write_text(draw_table(table), "utf-8")
        if sys.stdout.isatty() and not args.json:
            return None  # a person has read everything above
        fields = [{"name": f.name, "role": f.role, "type": f.type, "cardinality": f.cardinality} for f in table.fields]
        return {"version": table.version, "rows": table.rows, "splits": {s: table.rows_of(s) for s in table.splits},
                "fitted_on": table.fitted_on if table.records else None,
                "drift": dict(table.record.drift) if table.records else {},
                "fingerprint": {"layout": table.fingerprint.layout, "vocabulary": table.fingerprint.vocabulary},
                "fields": fields}
    problems = table.check()
    for problem in problems:
        say(problem)
    say(f"version {table.version}: {len(table.files)} files, {len(problems) or 'no'} problems")
    found = {"version": table.version, "rows": table.rows, "problems": problems}
    if problems:
        print(json.dumps(found), flush=True)
        raise SystemExit(FAILED)
    return found


def _vacuum(args: argparse.Namespace) -> dict[str, Any]:
    done = vacuum(TableStore(args.table), keep=args.keep, now=time.time(), dry_run=args.dry_run)
    for path in done.files:
        say(f"{'would go' if args.dry_run else 'removed'}: {path}")
    for path in done.passed_over:
        say(f"passed over: {path}, which is a link, or which no job of this table wrote")
    say(f"{len(done.files)} files, {done.bytes / 2**20:,.1f} MiB; kept: version "
        f"{', '.join(map(str, done.kept_versions))}")
    return {"removed": len(done.files), "bytes": done.bytes, "kept_versions": list(done.kept_versions),
            "pinned": list(done.pinned), "passed_over": list(done.passed_over), "dry_run": args.dry_run}


def _synth(args: argparse.Namespace) -> dict[str, Any]:
    try:
        if args.shape != "criteo":
            return synthesize_shape(args.shape, args.out, rows=args.rows, seed=args.seed)
        return synthesize(args.out, rows=args.rows, seed=args.seed, form=args.format, days=args.days,
                          progress=sys.stderr)
    except OSError as error:
        raise UsageError(f"{error.filename or args.out}: cannot be written ({error.strerror})") from None


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    run(main)


if __name__ == "__main__":
    program()
