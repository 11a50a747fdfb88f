"""Records what a policy decided on, and reads it back: `LookWriter` and `read`.

looks.jsonl of a run folder has a line for each start of the policy and one for each look on which it was asked. A look
has the values of its snapshot in a fixed order. [] stands for a value that has not changed since the line before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from sluice.agent.report.run_folder import RunError, read_lines
from sluice.common.errors import UsageError
from sluice.common.extras import DISTRIBUTION
from sluice.common.lines import say
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot, StageStats

FORMAT = 2
"""Release 0.2.0 wrote 1, with the columns of the table in place of the bytes of a row."""
_SAME: list[Any] = []
_PIPELINE = [f.name for f in fields(Snapshot) if f.name != "stages"]
_STAGE = [f.name for f in fields(StageStats)]


class LookWriter:
    """Writes lines by `write`. The first error is printed, and nothing is written after it. Never raises."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None] | None) -> None:
        self._write = write
        self._last: list[str] = []
        self._knobs: list[Knobs | None] = []

    def start(
        self,
        policy: str,
        made_of: Callable[[], Mapping[str, Any]],
        limits: Limits,
        knobs: Knobs,
        learned: Mapping[str, Any] | None,
    ) -> None:
        """Records a start of the policy. `learned` is what it recalled of an earlier run or start."""
        self._last, self._knobs = [], []

        def parts() -> Mapping[str, Any]:
            try:
                return made_of()
            except Exception as error:
                return {"unknown": f"{type(error).__name__}: {error}"}

        self._safely(
            lambda: {
                "kind": "start",
                "format": FORMAT,
                "version": metadata.version(DISTRIBUTION),
                "policy": policy,
                "made_of": parts(),
                "limits": limits.to_dict(),
                "knobs": knobs.to_dict(),
                "learned": learned,
                "values": [_PIPELINE, _STAGE],
            }
        )

    def decided(
        self,
        snapshot: Snapshot,
        knobs: Knobs,
        proposal: Knobs | None,
        choice: Mapping[str, Any] | None = None,
    ) -> None:
        """Records a look and the policy's choice, with the values of all candidates."""
        self._safely(
            lambda: {
                **self._look(snapshot, [knobs, proposal]),
                **({} if choice is None else {"choice": choice}),
            }
        )

    def failed(self, snapshot: Snapshot, knobs: Knobs, error: Exception) -> None:
        """Records a look on which the policy raised this error. `knobs` stay in force."""
        self._safely(
            lambda: {
                **self._look(snapshot, [knobs, None]),
                "error": f"{type(error).__name__}: {error}",
            }
        )

    def _look(self, snapshot: Snapshot, chosen: list[Knobs | None]) -> dict[str, Any]:
        values = [getattr(snapshot, name) for name in _PIPELINE]
        values += [getattr(stage, name) for stage in snapshot.stages for name in _STAGE]
        # As text, 1, 1.0 and True differ.
        texts = list(map(repr, values))
        last = self._last if len(texts) == len(self._last) else [""] * len(texts)
        line: dict[str, Any] = {
            "seen": [
                _SAME if new == old else value
                for value, new, old in zip(values, texts, last, strict=True)
            ]
        }
        if chosen != self._knobs:
            line["chose"] = [None if setting is None else setting.to_dict() for setting in chosen]
        self._last, self._knobs = texts, chosen
        return line

    def _safely(self, line: Callable[[], Mapping[str, Any]]) -> None:
        if self._write is None:
            return
        try:
            self._write(line())
        except Exception as error:
            self._write = None
            say(f"looks are no longer recorded in looks.jsonl: {error}")


@dataclass(frozen=True, slots=True)
class RecordedLook:
    """A snapshot on which the policy was asked, and its choice."""

    at: float
    """Seconds since the start of the run."""
    snapshot: Snapshot
    knobs: Knobs
    """The knobs from now on."""
    proposal: Knobs | None
    """The knobs that a policy such as `shadow` only proposed."""
    error: str | None = None
    """The policy's error, after which it was not asked again."""
    choice: Mapping[str, Any] | None = None
    """The candidates among which it chose, with their values. None: there was nothing to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start of the policy, and the looks until the next one."""

    version: str
    policy: str
    made_of: Mapping[str, Any]
    limits: Limits
    knobs: Knobs
    learned: Mapping[str, Any] | None
    looks: list[RecordedLook] = field(default_factory=list)


def read(run: Path) -> list[Start]:
    """Returns what the policy of a run was asked. Raises RunError if that was not recorded or cannot be read."""
    path = run / "looks.jsonl"
    lines = read_lines(path)
    if not lines:
        raise RunError(
            f"{path}: holds no looks: the run was recorded by an older version, without snapshots, or ended before its "
            "policy was asked; record it again with this version"
        )
    starts: list[Start] = []
    values: list[Any] = []
    chosen: list[Knobs | None] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.get("kind") == "start":
                if line["format"] != FORMAT:
                    raise ValueError(f"format {line['format']!r} is not {FORMAT}")
                starts.append(
                    Start(
                        **{n: line[n] for n in ("version", "policy", "made_of", "learned")},
                        limits=Limits.from_dict(line["limits"]),
                        knobs=Knobs.from_dict(line["knobs"]),
                    )
                )
                names, values = line["values"], []
            else:
                seen = line["seen"]
                values = [values[i] if new == _SAME else new for i, new in enumerate(seen)]
                if "chose" in line:
                    chosen = [
                        None if setting is None else Knobs.from_dict(setting)
                        for setting in line["chose"]
                    ]
                knobs, proposal = chosen
                if knobs is None:
                    raise ValueError("the chosen knobs are missing")
                snapshot = _snapshot(values, *names)
                starts[-1].looks.append(
                    RecordedLook(
                        float(line["at"]),
                        snapshot,
                        knobs,
                        proposal,
                        line.get("error"),
                        line.get("choice"),
                    )
                )
        except (AttributeError, LookupError, TypeError, ValueError, UsageError) as error:
            raise RunError(
                f"{path}, line {number}: is damaged or of another version: {type(error).__name__}: {error}; read the "
                "run with the version that wrote it, or delete this line and those after it"
            ) from None
    return starts


def _snapshot(values: Sequence[Any], pipeline: Sequence[str], stage: Sequence[str]) -> Snapshot:
    first = len(pipeline)
    stages = [
        StageStats(**dict(zip(stage, values[i : i + len(stage)], strict=True)))
        for i in range(first, len(values), len(stage))
    ]
    return Snapshot(**dict(zip(pipeline, values[:first], strict=True)), stages=tuple(stages))
