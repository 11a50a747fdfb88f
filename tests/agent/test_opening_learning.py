"""Teaching the learned policy: it learns, and resumes after an interrupt."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.agent.lab import curriculum, opening_teacher
from sluice.agent.lab.curriculum import Curriculum, teach
from sluice.agent.lab.episodes import Episodes
from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.student import Student
from sluice.agent.policies.opening.policy import NetworkPolicy, answer, observe
from sluice.agent.policies.opening.weights import WeightsError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    """As the teacher has it: so small a network is slower on several."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SMALL = Curriculum(lives=12, rounds=2, imitations=4, gradients=4, exams=2)


def test_both_forms_of_the_network_say_the_same():
    import torch

    look = Episodes([pipeline("training", n) for n in range(8)]).look(0.25)
    inputs, student = observe(look), Student.fresh(4)
    plain = answer(student.arrays(), inputs, look.real)
    with torch.no_grad():
        said = student.answers(
            *(torch.from_numpy(a) for a in (inputs.stages, inputs.pipelines, look.real))
        )
    for one, other in zip(plain, said, strict=True):
        own = look.real if one.shape == look.real.shape else slice(None)
        assert one[own] == pytest.approx(other.numpy()[own], abs=1e-5)


def test_what_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(curriculum, "_SAVED_EVERY", 2)
    monkeypatch.setattr(opening_teacher, "PIPELINES", 4)
    whole, record = teach(SMALL, tmp_path / "whole", lambda text: None)

    class Interrupted(Exception):
        pass

    for times in (1, 3):  # in the first round, and between two steps of policy gradient
        said: list[str] = []

        def say(text: str, times: int = times, said: list[str] = said) -> None:
            said.append(text)
            if len(said) == times:
                raise Interrupted

        with pytest.raises(Interrupted):
            teach(SMALL, tmp_path / "parts", say)
    assert "2 of 4" in said[-1]
    parts, same = teach(SMALL, tmp_path / "parts", lambda text: None)
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert record == same
    assert (
        NetworkPolicy(parts, record).record["lives"]
        == 12 + 4 * opening_teacher.PIPELINES * opening_teacher.GROUP
    )
    with pytest.raises(WeightsError, match="give another folder"):
        teach(
            Curriculum(lives=13, rounds=2, imitations=4, gradients=4, exams=2),
            tmp_path / "parts",
            print,
        )
