"""Who says what is wrong with a start that all ranks refuse, and where torchrun finds the reason."""

import json

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from sluice.dlrm import rank_exit, train

WRONG = ["--run-dir", "r", "--dta", "t"]
SAID = "no option '--dta' (did you mean '--data'?) (see --help)"


class Ended(BaseException):
    """torchrun ends this rank while it waits, since the first one has ended."""


@pytest.fixture
def second_rank(monkeypatch, tmp_path):
    """This process as the second rank; `waited` holds for how long it waits, and `ends` what that wait comes to."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    class Pause:
        waited: list[float] = []  # noqa: RUF012
        ends: BaseException | None = None

        @classmethod
        def sleep(cls, seconds: float) -> None:
            cls.waited.append(seconds)
            if cls.ends is not None:
                raise cls.ends

    Pause.waited.clear()
    monkeypatch.setattr(train.time, "sleep", Pause.sleep)
    return Pause


def test_the_first_rank_speaks_before_another_one_ends(second_rank, capsys):
    second_rank.ends = Ended()
    with pytest.raises(Ended):
        train.main(WRONG)
    assert second_rank.waited == [train._FIRST_SPEAKS_S]
    assert tuple(capsys.readouterr()) == ("", "")


def test_a_rank_that_alone_refuses_to_start_says_so_itself(second_rank, capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(WRONG)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"error": SAID}, f"error: {SAID}\n")


def test_torchrun_shows_the_reason_in_its_summary(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    rank_exit.tell_torchrun("no room")
    failure = ProcessFailure(
        local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json")
    )
    assert failure.message["extraInfo"]["py_callstack"] == "error: no room"
    assert failure.message["message"] == "error: no room"
