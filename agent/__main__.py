"""Shows runs (`sluice report`, `explain`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sluice.common.errors import printable
from sluice.common.lines import say
from sluice.common.program import command_of, run
from sluice.common.settings import parse, setting

_EXAMPLES = """examples:
  sluice report runs/first
  sluice explain runs/first

Training, `sluice bench` and loaders write run folders. The run need not have ended.
The last line of standard output is a JSON object."""
_USAGE = f"""usage: sluice COMMAND …

{__doc__}

commands:
  report     write RUN/report.html again: one page that opens offline
  explain    print what happened: the verdict, and each change with its reason and its effect

`sluice COMMAND --help` lists a command's options.

{_EXAMPLES}"""


@dataclass(frozen=True, kw_only=True)
class RunChoice:
    """The option of `report` and `explain`."""

    run: str = setting(help="the run folder (it holds config.json)", metavar="RUN", positional=True)


def main(argv: list[str]) -> Mapping[str, Any] | None:
    """Runs the command in `argv`. Returns the object for the last line of output, if there is one."""
    name = command_of(argv, COMMANDS, _USAGE)
    return COMMANDS[name](argv[1:]) if name else None


def report(argv: list[str]) -> dict[str, Any]:
    """Writes a run's page again: one page that opens offline."""
    options = parse(RunChoice, argv, "sluice report", description=report.__doc__, epilog=_EXAMPLES)

    from sluice.agent.report import page
    from sluice.agent.report.story import Story

    written = page.write(options.run)
    story = Story.read(options.run)
    say(f"{story.verdict}\n{written}")
    return {"report": str(written), **story.summary}


def explain(argv: list[str]) -> dict[str, Any]:
    """Prints what happened in a run: the verdict, and each change with its reason and its effect."""
    options = parse(
        RunChoice, argv, "sluice explain", description=explain.__doc__, epilog=_EXAMPLES
    )

    from sluice.agent.report.story import Story

    story = Story.read(options.run)
    print(printable(story.explanation))
    return {"verdict": story.verdict, **story.summary}


COMMANDS: dict[str, Callable[[list[str]], Mapping[str, Any] | None]] = {
    "report": report,
    "explain": explain,
}


def program() -> NoReturn:
    """Runs the whole program. It is the entry point of the command."""
    run(main)


if __name__ == "__main__":
    program()
