"""`sluice report RUN` and `sluice explain RUN`: what a run folder holds, as a page and in words."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from sluice.agent.evaluate import simulated
from sluice.agent.learn import train
from sluice.agent.report import narrative, page
from sluice.agent.report.run_folder import Run
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.program import run, say


def main(argv: list[str]) -> Mapping[str, Any]:
    if argv[:1] == ["evaluate"]:
        return simulated.main(argv[1:])
    if argv[:1] == ["simulate"]:
        return simulated.simulate(argv[1:])
    if argv[:1] == ["train"]:
        return train.main(argv[1:])
    parser = ArgumentParser(
        prog="sluice", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  sluice report runs/first\n  sluice explain runs/first\n\n"
               "Both read a run folder that training or `sluice bench` left, finished or not.\n"
               "The last line of standard output is a JSON object.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("report", "write RUN/report.html again: one page that opens offline"),
                       ("explain", "tell what happened: the verdict, each change with its reason and its effect")):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run", metavar="RUN", help="the run folder (it holds config.json)")
    for name, text in (("evaluate", "judge policies in the simulator: the whole table (see `evaluate --help`)"),
                       ("simulate", "one policy through one scenario, told as it goes (see `simulate --help`)"),
                       ("train", "teach the learned policy in simulated pipelines (see `train --help`)")):
        commands.add_parser(name, help=text, add_help=False)
    options = parser.parse_args(argv)
    return {"report": _report, "explain": _explain}[options.command](options.run)


def _report(path: str) -> dict[str, Any]:
    written = page.write(path)
    say(f"{narrative.verdict(Run.read(path))}\n{written}")
    return {"report": str(written), **_figures(path)}


def _explain(path: str) -> dict[str, Any]:
    found = Run.read(path)
    print(narrative.tell(found))
    return {"verdict": narrative.verdict(found), **_figures(path)}


def _figures(path: str) -> dict[str, Any]:
    return dataclasses.asdict(narrative.outcome(Run.read(path)))


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
