"""The threads of a rank's steps: one core is the loader's, but for large steps on two cores."""

import pytest

from sluice.dlrm.step_threads import thread_count, wait_briefly

LARGE, SMALL = 1024, 1023


def waiting(cores: float, **environ: str) -> dict[str, str]:
    """The environment of a rank once its threads were made to spin briefly."""
    wait_briefly(environ, cores)
    return environ


@pytest.mark.parametrize(
    ("cores", "local_ranks", "rows", "threads"),
    [
        (1, 1, LARGE, 1),
        (2, 1, LARGE, 2),
        (2, 1, SMALL, 1),
        (2, 2, LARGE, 1),
        (4, 2, LARGE, 2),
        (2.5, 1, LARGE, 2),
        (8, 1, LARGE, 7),
        (8, 1, SMALL, 7),
    ],
)
def test_threads_follow_the_cores_and_the_rows_of_a_step(cores, local_ranks, rows, threads):
    environ = waiting(cores, LOCAL_WORLD_SIZE=str(local_ranks))
    assert thread_count(environ, cores, rows) == threads


@pytest.mark.parametrize(("cores", "briefly"), [(1, False), (2, True), (3, False), (8, False)])
def test_only_threads_of_two_cores_spin_briefly(cores, briefly):
    assert waiting(cores) == ({"GOMP_SPINCOUNT": "10000"} if briefly else {})


def test_what_the_user_chose_stays():
    """Threads that spin for long would take the loader's core, so there is one of them."""
    active = waiting(2, OMP_WAIT_POLICY="active")
    assert active == {"OMP_WAIT_POLICY": "active"}
    assert thread_count(active, 2, LARGE) == 1
    assert thread_count(waiting(2, GOMP_SPINCOUNT="500"), 2, LARGE) == 2
    assert waiting(2, GOMP_SPINCOUNT="500") == {"GOMP_SPINCOUNT": "500"}
    assert waiting(2, OMP_NUM_THREADS="3") == {"OMP_NUM_THREADS": "3"}
