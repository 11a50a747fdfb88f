"""Reads scenarios from JSON: `load`. docs/scenarios.md describes the format.

Errors name the path of the key, for example `stages[1].cost_s`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from sluice.agent.lab.simulator.physics import Consumer, MechanismError, SimMachine, SimStage
from sluice.agent.lab.simulator.scenario import (
    Scenario,
    ScenarioError,
    ScheduledChange,
    value_of,
)
from sluice.common.number_checks import is_number, is_whole
from sluice.ingest.knobs import MAX_WORKERS, KnobError, nearest, parse_bytes
from sluice.ingest.stage_spec import StageSpec

SHIPPED = Path(__file__).parent / "scenarios"
_COSTS = {f.name for f in dataclasses.fields(SimStage)} - {
    f.name for f in dataclasses.fields(StageSpec)
}
"""The true costs of a stage. They may change during a scenario."""
_STAGE = {*_COSTS, "name", "backends", "max_workers"}


def load(path: str | Path) -> Scenario:
    """Returns the scenario of a file. Raises ScenarioError with the file and the path of the key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    try:
        return parse(json.loads(text))
    except json.JSONDecodeError as error:
        raise ScenarioError(
            f"{path}: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from error


def shipped() -> list[Scenario]:
    """Returns the scenarios of the package, in the order of their numbers."""
    return [load(path) for path in sorted(SHIPPED.glob("*.json"))]


def parse(values: Any) -> Scenario:
    """Returns the scenario of parsed JSON. Raises ScenarioError with the path of the key."""
    given = _object(values, "", _fields(Scenario))
    for name in ("name", "stages"):
        if name not in given:
            raise ScenarioError(f"{name}: is missing")
    if not isinstance(given["stages"], list):
        raise ScenarioError("stages: is not a list of objects")
    given["stages"] = tuple(_stage(s, f"stages[{i}]") for i, s in enumerate(given["stages"]))
    for name, kind in (("machine", SimMachine), ("consumer", Consumer)):
        given[name] = _part(kind, given.get(name, {}), name)
    plain = Scenario(**{k: given[k] for k in ("name", "stages", "machine", "consumer")})
    if not isinstance(given.get("start", {}), dict):
        raise ScenarioError("start: is not an object of stage names and numbers of workers")
    for name, count in given.get("start", {}).items():
        if name not in plain.limits.workers:
            raise ScenarioError(f"start.{name}: no such stage{nearest(name, plain.limits.workers)}")
        if not is_whole(count, 1):
            raise ScenarioError(f"start.{name}: {count!r} is not a number of workers")
    if not isinstance(given.get("changes", []), list):
        raise ScenarioError("changes: is not a list of objects")
    changes: list[ScheduledChange] = []
    for i, change in enumerate(given.get("changes", [])):
        changes += _changes(plain, change, f"changes[{i}]", changes)
    given["changes"] = tuple(changes)
    return Scenario(**given)


def _stage(values: Any, path: str) -> SimStage:
    given = _object(values, path, _STAGE)
    most = given.pop("max_workers", 0)
    if not is_whole(most, 0, MAX_WORKERS):
        raise ScenarioError(
            f"{path}.max_workers: {most!r} is not a whole number from 0 to {MAX_WORKERS}"
        )
    stage: SimStage = _part(SimStage, given, path)
    return dataclasses.replace(stage, workers=most, workers_a_core=0) if most else stage


def _object(values: Any, path: str, known: set[str]) -> dict[str, Any]:
    """Returns a copy of a JSON object that has only `known` keys."""
    if not isinstance(values, dict):
        raise ScenarioError(f"{path or 'scenario'}: is not an object")
    for key in values:
        if key not in known:
            raise ScenarioError(
                f"{path + '.' if path else ''}{key}: unknown key{nearest(key, known)}"
            )
    return dict(values)


def _fields(kind: type) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)}


def _part(kind: type, values: Any, path: str) -> Any:
    """Returns an object of this kind from parsed JSON."""
    given = _object(values, path, _fields(kind))
    for key, value in given.items():
        if isinstance(value, str) and key.endswith(("_bytes", "memory_limit")):
            given[key] = float(_bytes(value, f"{path}.{key}"))
    missing = [
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.name not in given
    ]
    if missing:
        raise ScenarioError(f"{path}.{missing[0]}: is missing")
    try:
        return kind(**given)
    except (MechanismError, TypeError) as error:
        raise ScenarioError(f"{path}.{error}") from error


def _bytes(value: str, path: str) -> int:
    try:
        return parse_bytes(value)
    except KnobError as error:
        raise ScenarioError(f"{path}: {error}") from error


def _number(values: dict[str, Any], key: str, path: str, default: float) -> float:
    value = values.get(key, default)
    if not is_number(value, -math.inf):
        raise ScenarioError(f"{path}.{key}: {value!r} is not a number")
    return float(value)


def _changes(
    plain: Scenario, values: Any, path: str, earlier: list[ScheduledChange]
) -> list[ScheduledChange]:
    """Returns the changes of one entry of `changes`, after the `earlier` ones."""
    values = _object(values, path, {"at", "over", "set", "scale"})
    if "at" not in values:
        raise ScenarioError(f"{path}.at: is missing")
    at = _number(values, "at", path, 0)
    over = _number(values, "over", path, 0)
    if at < 0 or over < 0:
        raise ScenarioError(f"{path}.{'at' if at < 0 else 'over'}: is below 0")
    changes: list[ScheduledChange] = []
    for how in ("set", "scale"):
        if not isinstance(values.get(how, {}), dict):
            raise ScenarioError(f"{path}.{how}: is not an object of keys and numbers")
        for key, given in values.get(how, {}).items():
            where = f"{path}.{how}.{key}"
            base = _base(plain, key, where)
            is_size = isinstance(given, str) and key.endswith(("_bytes", "memory_limit"))
            number = _bytes(given, where) if is_size else given
            value = _number({key: number}, key, f"{path}.{how}", 0)
            before = next((c.value for c in reversed([*earlier, *changes]) if c.key == key), base)
            changes.append(
                ScheduledChange(
                    at=at,
                    over=over,
                    key=key,
                    value=value * before if how == "scale" else value,
                )
            )
            try:
                dataclasses.replace(plain, changes=(*earlier, *changes))
            except MechanismError as error:
                raise ScenarioError(f"{where}: {error}") from error
    return changes


def _base(plain: Scenario, key: str, where: str) -> float:
    """Returns the value before a change. Raises ScenarioError if there is no such number."""
    owner, _, name = key.rpartition(".")
    kinds: dict[str, type] = {"machine": SimMachine, "consumer": Consumer} | {
        f"stages.{s.name}": SimStage for s in plain.stages
    }
    if owner not in kinds:
        raise ScenarioError(f"{where}: no such part{nearest(owner, kinds)}")
    numbers = _fields(kinds[owner]) if kinds[owner] is not SimStage else _COSTS
    if name not in numbers:
        raise ScenarioError(f"{where}: no such number{nearest(name, numbers)}")
    return value_of(plain, key)
