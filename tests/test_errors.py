"""A user's mistake is a `UsageError`, by which programs end with 2. What else may be raised is listed here."""

import ast
import builtins
import importlib
import os
import signal

import pytest

from sluice.common.suggest import meant
from tests.product import UsageError
from tests.test_architecture import modules, statements, tree

NOT_A_USERS_MISTAKE = {
    "Closed",
    "CommitConflict",
    "DamagedPage",
    "DeliveryError",
    "Died",
    "Elsewhere",
    "FeatureError",
    "FieldError",
    "FunctionError",
    "FunctionMemoryError",
    "Gone",
    "InvalidMessage",
    "JobEnded",
    "JobFailure",
    "LostRanks",
    "MechanismError",
    "NoWorkerAnswers",
    "Overdue",
    "Preempted",
    "QuarantineError",
    "RecordError",
    "Refusal",
    "RunFailure",
    "SharedMemoryError",
    "SlowStart",
    "StatsError",
    "Stopped",
    "StoreClosed",
    "ThriftError",
    "ThrottledError",
    "ValueRefused",
    "WorkerClosed",
    "WorkerCrashed",
    "WorkerError",
    "WorkerLost",
    "WrongAnswer",
}
"""What else may be raised. It ends a program with 1."""

PROGRAMS = (
    "etl.job",
    "etl.__main__",
    "ingest.__main__",
    "agent.__main__",
    "dlrm.train",
    "dlrm.evaluate",
    "dlrm.serve",
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
    known = [getattr(builtins, ancestor, None) for ancestor in above(name)]
    return any(
        isinstance(ancestor, type) and issubclass(ancestor, BaseException) for ancestor in known
    ) or any(
        ancestor not in CLASSES and ancestor.endswith(("Error", "Exception", "Warning"))
        for ancestor in above(name)
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


def test_each_exception_is_a_users_mistake_or_is_listed():
    assert "DoesNotFit" in MISTAKES, "it derives from another mistake"
    assert set(RAISED) - set(MISTAKES) == NOT_A_USERS_MISTAKE


@pytest.fixture
def in_this_process(monkeypatch):
    """A program may end here: its handler of interrupts goes with it, and one that leaves at once only raises."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(os, "_exit", leave)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_ends_a_users_mistake_with_2_and_one_line(
    program, in_this_process, monkeypatch, capsys
):
    module = importlib.import_module(f"sluice.{program}")
    for name in MISTAKES:
        error = made(name)

        def fail(*_: object, error: UsageError = error) -> None:
            raise error

        if program == "dlrm.train":  # it prints the error of its rank itself
            monkeypatch.setattr("sys.argv", ["train", "--run-dir", "r", "--data", "t"])
            monkeypatch.setattr("sluice.dlrm.session.run.open_run", fail)
        else:
            monkeypatch.setattr(module, "main", fail)
        with pytest.raises(SystemExit) as ended:
            module.program()
        out, err = capsys.readouterr()
        assert (name, ended.value.code, err) == (name, 2, f"error: {error}\n")
        assert program == "dlrm.train" or not out


def test_a_part_of_an_object_is_meant_by_the_objects_name():
    assert meant("geo", ["video", "geo.country"]) == " (did you mean 'geo.country'?)"
