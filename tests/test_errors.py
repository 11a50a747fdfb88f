"""A user's mistake has one root, by which programs end with 2; what else may be raised stands in a list, with why."""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import signal

import pytest

from sluice.common.errors import UsageError
from sluice.common.program import run
from tests.optional_folders import OPTIONAL, is_left_out
from tests.test_architecture import modules, statements, tree

NOT_A_USERS_MISTAKE = {
    "DamagedCopy": "an entry of the packed copy, which is then made anew",
    "BagError": "the loader tells of it as a ColumnError, with its place",
    "Closed": "between a pool's threads",
    "CommitConflict": "two jobs wrote at once: the second may try again",
    "DeliveryError": "a store's, as an OSError",
    "DeviceError": "of a caller in Python; no program asks for a device by its words",
    "Died": "a worker process ended",
    "Elsewhere": "another rank ended, and said why",
    "FeatureError": "an operator, or the user's function in it, failed while it ran",
    "FieldError": "of code that describes a column",
    "FooterError": "told as a SourceError or a ParquetError, with the file",
    "FunctionError": "the user's function raised while it ran",
    "FunctionMemoryError": "the user's function had no memory while it ran",
    "Gone": "between a worker process and its parent",
    "GradientError": "training has left the finite numbers",
    "MechanismError": "told as a ScenarioError, with its key",
    "PolicyInputError": "of code that describes how a pipeline began",
    "QuarantineError": "more rows were bad while a run went on than may be set aside",
    "RecordError": "told as a DamagedRecord, with its file",
    "RestartsExhausted": "a worker process ended again and again",
    "JobFailure": "a job that its engine could not finish",
    "SharedMemoryError": "the system's",
    "StatsError": "of code that describes what a stage did",
    "StepFailed": "a step of the demo ended badly, and said why",
    "Stopped": "a run was asked to stop",
    "StoreClosed": "between a loader's threads",
    "ThriftError": "told as a FooterError",
    "TooLarge": "a batch has no place in shared memory, so the worker is handed it in parts",
    "ValueRefused": "told as a ColumnError or a TransformError, with its place",
    "NoWorkerAnswers": "between a loader's threads: work that no remote worker takes is done here",
    "WorkerClosed": "between a loader's threads",
    "WorkerCrashed": "a worker process ended",
    "WorkerError": "the root of those of worker processes",
}
"""They end a program with 1, where they end it."""
if OPTIONAL["local ETL"].is_there:
    NOT_A_USERS_MISTAKE |= {"JobEnded": "between the threads of a job"}
if OPTIONAL["remote workers"].is_there:
    NOT_A_USERS_MISTAKE |= {
        "WorkerLost": "the unit is asked for again, of another worker",
        "WrongAnswer": "the unit is asked for again",
    }
if OPTIONAL["serving"].is_there:
    NOT_A_USERS_MISTAKE |= {
        "BadValue": "a request's, which a server answers by a status",
        "ClientGone": "between a server and its answer, which nobody reads",
        "AmbiguousRequest": "a request's, which a server answers by a status",
        "Full": "a server's queue, answered by a status",
        "NotEqual": "an exported program does not do what the model does",
        "Refusal": "a request's, which a server answers by a status",
    }

PROGRAMS = (
    "etl.job",
    "etl.__main__",
    "ingest.__main__",
    "agent.__main__",
    "dlrm.train",
    "dlrm.evaluate",
    "dlrm.serve",
    "dlrm.export",
    "dlrm.plan",
)


def of_ours() -> dict[str, tuple[str, list[str]]]:
    """Each public class, the module that holds it, and the names of what is above it."""
    return {
        node.name: (name, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
        for name, path in modules().items()
        for node in statements(tree(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


CLASSES = of_ours()


def above(name: str) -> set[str]:
    """The class and all that it derives from, by name; a library's may have the same name."""
    bases = CLASSES[name][1] if name in CLASSES else []
    return {name}.union(*(above(base) for base in bases if base != name))


def is_raised(name: str) -> bool:
    known = [getattr(builtins, one, None) for one in above(name)]
    return any(isinstance(one, type) and issubclass(one, BaseException) for one in known) or any(
        one not in CLASSES and one.endswith(("Error", "Exception", "Warning"))
        for one in above(name)
    )


RAISED = sorted(filter(is_raised, CLASSES))
MISTAKES = [name for name in RAISED if "UsageError" in above(name)]


def made(name: str) -> UsageError:
    kind = getattr(importlib.import_module(CLASSES[name][0]), name)
    assert issubclass(kind, UsageError)
    assert issubclass(kind, ValueError), f"{name}: users' code catches it as a ValueError"
    return kind.__new__(
        kind, "table t: there is none; name another"
    )  # some are made from more than a text


def test_each_exception_is_a_users_mistake_or_is_listed_with_why():
    assert len(MISTAKES) > 30
    assert "DoesNotFit" in MISTAKES, "of one that derives from another"
    assert set(RAISED) - set(MISTAKES) == NOT_A_USERS_MISTAKE.keys()


@pytest.fixture
def in_this_process(monkeypatch):
    """A program may end here: its handler of interrupts goes with it, and one that leaves at once only raises."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(os, "_exit", leave)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_a_program_with_2_and_one_line(name, in_this_process, capsys):
    error = made(name)

    def main(_argv: list[str]) -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(main, argv=[])
    assert ended.value.code == 2
    assert tuple(capsys.readouterr()) == ("", f"error: {error}\n")


@pytest.mark.parametrize(
    "program", [name for name in PROGRAMS if not is_left_out(f"{name.replace('.', '/')}.py")]
)
def test_each_program_ends_so(program, in_this_process, monkeypatch, capsys):
    module = importlib.import_module(f"sluice.{program}")
    for name in MISTAKES:
        error = made(name)

        def fail(*_: object, error: UsageError = error) -> None:
            raise error

        if program == "dlrm.train":  # it says itself what its rank met
            monkeypatch.setattr("sys.argv", ["train", "--run-dir", "r", "--data", "t"])
            monkeypatch.setattr(module.start, "start_point", fail)
        else:
            monkeypatch.setattr(module, "main", fail)
        with pytest.raises(SystemExit) as ended:
            module.program()
        assert (name, ended.value.code, capsys.readouterr().err) == (name, 2, f"error: {error}\n")
