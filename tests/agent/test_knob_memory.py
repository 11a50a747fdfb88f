"""Where knobs start and end: by option, file and registry; and which of a run's choices is the best one."""

from sluice import Knobs
from sluice.agent.runtime.knob_memory import BestChoice
from tests.agent.fake import FakePipeline, FakeStage
from tests.product import KnobMemory, LoaderOptions, SavedState


class FakeLoader(FakePipeline):
    layout, row_bytes = "abc", 100


def _loader():
    return FakeLoader(
        [FakeStage(name="decode", cpu_s=0.001), FakeStage(name="online", cpu_s=0.001)]
    )


def _metric(rows, **workers):
    return {
        "kind": "loader",
        "rows": rows,
        "rows_per_s": rows,
        "knobs": Knobs(workers=workers).to_dict(),
    }


def _best(*lines):
    best = BestChoice()
    for line in lines:
        best.observe(line)
    return best.choice()


def test_the_best_choice_is_not_the_one_that_was_just_tried():
    good, bad = [_metric(100.0, decode=4)] * 5, [_metric(60.0, decode=8)] * 5
    assert _best(*good, *bad) == (Knobs(workers={"decode": 4}), 100.0)
    assert _best(*good[:3]) is None  # the first shows what was before, and two are few


def test_a_start_does_not_count_against_the_choice_it_was_made_with():
    starting = [_metric(0.0, decode=4)] * 9
    assert _best(*starting, *[_metric(100.0, decode=4)] * 5) == (
        Knobs(workers={"decode": 4}),
        100.0,
    )


def test_of_choices_as_good_as_each_other_the_last_counts():
    lean, back = [_metric(99.0, decode=2)] * 5, [_metric(100.0, decode=4)] * 5
    assert _best(*back, *lean)[0] == Knobs(workers={"decode": 2})
    assert _best(*lean, *back, *lean)[0] == Knobs(workers={"decode": 2})


def test_what_was_good_before_the_workload_changed_counts_no_more():
    assert _best(
        *[_metric(100.0, decode=4)] * 5, {"kind": "incident"}, *[_metric(30.0, decode=9)] * 5
    ) == (Knobs(workers={"decode": 9}), 30.0)


def _ended(tmp_path, **wanted):
    loader, said = _loader(), []
    kept = KnobMemory(
        loader, LoaderOptions(registry=str(tmp_path / "registry"), **wanted), say=said.append
    )
    known = kept.start()
    loader.advance(5.0)
    kept.finish(policy="planner", learned={"services": {"decode": 0}})
    return loader, known, said


def test_a_run_leaves_its_choice_for_the_next_and_in_a_file(tmp_path):
    file = tmp_path / "best.json"
    first, known, said = _ended(tmp_path, knobs="decode=3", save_knobs=str(file))
    assert (known, said) == (False, [])
    saved = SavedState.load(str(file), first.limits)
    assert (saved.knobs.workers, saved.policy) == ({"decode": 3, "online": 1}, "planner")
    second, known, said = _ended(tmp_path)
    assert known
    assert second.knobs.workers["decode"] == 3
    assert "registry" in said[0]
    third, _, _ = _ended(tmp_path, knobs=str(file))
    assert third.knobs.workers["decode"] == 3


def test_what_a_policy_knew_of_the_stages_is_there_for_the_next_run_of_the_same_schema(tmp_path):
    def begun(layout="abc"):
        loader = _loader()
        loader.layout = layout
        kept = KnobMemory(loader, LoaderOptions(registry=str(tmp_path / "registry")), say=print)
        kept.start()
        return kept.learned

    assert begun() is None
    _ended(tmp_path)
    assert begun() == {"services": {"decode": 0}}
    assert begun("abd") is None  # its stages cost what they cost


def test_ranks_that_share_a_machine_have_an_entry_of_their_own():
    alone, shared = (
        KnobMemory(_loader(), LoaderOptions(), say=print, ranks=n).context for n in (1, 2)
    )
    assert shared.machine == f"{alone.machine}, shared by 2 ranks"
