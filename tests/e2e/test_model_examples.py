"""What the examples that train models compute: scores, losses, sessions and cuts, on the smallest sizes."""

from __future__ import annotations

import importlib
import itertools
import json
import threading
from pathlib import Path
from queue import Queue

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


def test_a_score_is_made_of_each_rows_own_gradient(example):
    compact, clicks = example("compact_network"), example("clicks")
    torch.manual_seed(1)
    rows = 6
    dense, ids = (
        torch.randn(rows, clicks.NUMBERS),
        torch.randint(clicks.IDS, (clicks.COLUMNS, rows)),
    )
    clicked = torch.tensor([1.0, 0, 1, 0, 0, 1])
    for kind in compact.KINDS:
        model = compact.Candidate(kind, 2, (4,)).model(0)
        found = compact.compute_parts(model, dense, ids, clicked)
        weights = [weight.detach() for weight in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        jacobian = torch.autograd.functional.jacobian(
            lambda *given, model=model, names=names: torch.func.functional_call(
                model, dict(zip(names, given, strict=True)), (dense, ids)
            ),
            tuple(weights),
        )
        each = torch.cat([part.flatten(1) for part in jacobian], 1).double()
        middle = each - each.mean(0)
        kernel, beyond = middle @ middle.T, (clicked - clicked.mean()).double()
        fit = beyond @ kernel @ beyond / (kernel.norm() * (beyond @ beyond))
        assert found["fit"] == pytest.approx(float(fit), rel=1e-3)
        assert found["complexity"] == pytest.approx(float(torch.tensor(float(len(each[0]))).log()))


def test_orders_are_compared_and_ranks_are_averaged(example):
    compact = example("compact_network")
    assert compact.kendall([1, 2, 3], [10, 20, 30]) == 1
    assert compact.kendall([1, 2, 3], [30, 20, 10]) == -1
    assert compact.kendall([1, 2, 3], [10, 30, 20]) == pytest.approx(1 / 3)
    one = dict.fromkeys(compact.PARTS, 0.0)
    assert compact.compute_scores(
        [one, {**one, "fit": 1.0}, {**one, "fit": 2.0, "saliency": 5.0}]
    ) == [
        0,
        0.25,
        1.0,
    ]
    assert len(set(compact.draw_candidates(30, 0))) == 30


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
    found = transfer.compare_students(
        {**data, "train": 3 * data["here"]}, 0, tmp_path / "teacher.pt"
    )
    assert 0.6 < found["teacher"] < true
    found = transfer.compare_transfers(data, 0, tmp_path / "teacher.pt")
    assert found["moved"] > found["anew"] + 0.03


def test_the_planted_structure_of_sessions_is_found(example, tmp_path, monkeypatch):
    sessions = example("session_items")
    monkeypatch.setattr(sessions, "ITEMS", 60)
    monkeypatch.setattr(sessions, "TOP", 5)
    sessions.write_sessions(tmp_path / "rows.json", 900, 1)
    lines = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    before, then = [], []
    for _, session in itertools.groupby(lines, key=lambda line: line["user"]):
        items = [1 + int(line["item"][1:]) for line in session]
        for place in range(1, len(items)):
            before.append(torch.tensor([0] * (sessions.LONGEST - place) + items[:place]))
            then.append(items[place])
    rows, cut = sessions.Sessions(torch.stack(before), torch.tensor(then)), len(then) * 4 // 5
    train, test = (
        sessions.Sessions(*(each[:cut] for each in rows)),
        sessions.Sessions(*(each[cut:] for each in rows)),
    )
    popular, after, _ = sessions.count_pairs(train, 61)
    assert int(popular.sum()) == cut
    successors = sessions.draw_successors()
    assert torch.isin(after[1:].argmax(1)[:20], torch.from_numpy(successors).unique() + 1).all()
    model = sessions.train_model(train, 61, 6, stages=2, seed=0, batch_size=64)
    with torch.no_grad():
        hit, _ = sessions.hits(model(test.before), test.then)
    assert hit > 1.3 * sessions.hits(popular.expand(len(test.then), -1), test.then)[0]


def test_ranks_of_hits_are_counted_with_ties_in_the_middle(example):
    hits = example("session_items").hits
    scores = torch.tensor([[0.0, 3, 2, 1], [0, 0, 0, 0]])
    assert hits(scores, torch.tensor([2, 1])) == pytest.approx((1.0, (1 / 2 + 1 / 2.5) / 2))


def test_a_cut_tower_learns_what_the_whole_one_does(example, tmp_path):
    """Two parts in threads, with queues for what goes between them."""
    devices, clicks = example("two_devices"), example("clicks")
    clicks.write_clicks(tmp_path / "clicks", 600, seed=1)
    batches = clicks.load_batches(tmp_path / "clicks", 200)
    whole = devices.build_layers(16, 3)
    devices.train_on_one_device(whole, batches)
    for cut in range(1, len(whole)):
        layers, there, back = devices.build_layers(16, 3), Queue(), Queue()
        first = devices.Part(
            layers[:cut], True, there.put, lambda shape, back=back: back.get(timeout=60)
        )
        second = devices.Part(
            layers[cut:], False, back.put, lambda shape, there=there: there.get(timeout=60).clone()
        )
        other = threading.Thread(
            target=lambda second=second: [second.step(batch, 4, 16) for batch in batches]
        )
        other.start()
        for batch in batches:
            first.step(batch, 4, 16)
        other.join(timeout=60)
        for one, cut_one in zip(whole, layers, strict=True):
            for weight, same in zip(one.parameters(), cut_one.parameters(), strict=True):
                assert torch.allclose(weight, same, rtol=0, atol=1e-6)
        assert not torch.equal(layers[-1].weight, devices.build_layers(16, 3)[-1].weight), (
            "something was learned"
        )


@pytest.mark.parametrize(
    ("costs", "cut", "micro_batches", "seconds"),
    [
        ([(1, 1), (1, 1)], 1, 1, 4),  # nothing to do meanwhile
        (
            [(1, 1), (1, 1)],
            1,
            2,
            6,
        ),  # forwards at 1 and 2; the second device done at 3 and 5; backwards at 4 and 6
        ([(1, 2), (3, 3)], 1, 3, 21),  # the second device is never without work from 1 to 19
        ([(2, 4), (1, 0)], 1, 3, 18),
    ],
)  # the first one never
def test_a_steps_length_follows_from_its_parts(example, costs, cut, micro_batches, seconds):
    devices = example("two_devices")
    assert (
        devices.predict_step_s([devices.Cost(*one) for one in costs], cut, micro_batches) == seconds
    )


def test_every_example_is_short_and_says_what_it_does(repo):
    for path in Path(repo, "examples").glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 260, path.name
        assert text.startswith('"""'), path.name
