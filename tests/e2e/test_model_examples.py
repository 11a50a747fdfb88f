"""What the examples that train models compute, on the smallest sizes."""

import importlib

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def example(repo, monkeypatch):
    monkeypatch.syspath_prepend(str(repo / "examples"))
    return importlib.import_module


def test_a_student_learns_half_from_clicks_and_half_from_its_teacher(example):
    transfer = example("transfer")
    teacher, student = transfer.new_model(0), transfer.new_model(0, 2)
    assert sum(p.numel() for p in student.parameters()) < 0.55 * sum(
        p.numel() for p in teacher.parameters()
    )
    dense, ids = torch.randn(4, 4), torch.randint(100, (8, 4))
    logits, clicks = torch.zeros(4, requires_grad=True), torch.tensor([1.0, 0, 1, 0])
    transfer.distillation_loss(teacher)(logits, clicks, dense, ids).backward()
    wanted = (clicks + torch.sigmoid(teacher(dense, ids)).detach()) / 2
    assert torch.allclose(logits.grad, (0.5 - wanted) / 4)


def test_a_checkpoint_that_moves_to_another_shop_is_ahead_of_a_model_that_begins_there(
    example, tmp_path, monkeypatch
):
    transfer, clicks = example("transfer"), example("clicks")
    monkeypatch.setattr(transfer, "RATES", (0.03,))
    data, shops = (
        {},
        (
            ("here", 20_000, 1, {}),
            *(
                (name, 1000, seed, {"shop": 1, "drift": 0.1})
                for name, seed in (("train", 2), ("held out", 3), ("test", 4))
            ),
        ),
    )
    for name, rows, seed, other in shops:
        true = clicks.write_clicks(tmp_path / name, rows, seed=seed, **other)
        data[name] = clicks.load_batches(tmp_path / name)
        assert sum(len(label) for *_, label in data[name]) == rows
    scores = transfer.compare_students(
        {**data, "train": 3 * data["here"]}, 0, tmp_path / "teacher.pt"
    )
    assert 0.6 < scores["teacher"] < true
    scores = transfer.compare_transfers(data, 0, tmp_path / "teacher.pt")
    assert scores["moved"] > scores["anew"] + 0.03
