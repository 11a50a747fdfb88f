"""What is known of a pipeline's stages before it runs, and what follows from that for limits and memory."""

import pytest

from sluice.ingest.stage_spec import limits_of, pipeline, transform
from tests.product import BACKENDS

STAGES = pipeline([transform("first", movable=True), transform("second", movable=False)])


@pytest.mark.parametrize(
    ("cores", "most", "first"),
    [
        (2, (64, 16, 16), (2, 1, 1)),
        (32, (256, 128, 128), (32, 1, 1)),
    ],
)
def test_workers_at_the_start_and_at_most_follow_from_the_cores(cores, most, first):
    limits = limits_of(STAGES, cores, BACKENDS)
    assert limits.workers == dict(
        zip(
            ("decode", "first", "second"),
            [(1, n) for n in most],
            strict=True,
        )
    )
    assert tuple(stage.first_workers(cores) for stage in STAGES) == first


def test_decoding_never_waits_for_a_far_store_so_it_needs_no_more_than_the_cores():
    stages = pipeline([], fetches=True)
    most = limits_of(stages, 8, BACKENDS).workers
    assert [(stage.name, most[stage.name], stage.first_workers(8)) for stage in stages[:2]] == [
        ("fetch", (1, 64), 32),
        ("decode", (1, 8), 8),
    ]


def test_transforms_alone_are_moved():
    limits = limits_of(STAGES, 2, BACKENDS)
    assert limits.backends == {"first": BACKENDS}
    assert [stage.name for stage in STAGES if stage.buffer_limit == "series"] == ["first", "second"]
