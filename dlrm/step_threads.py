"""How many threads compute a rank's steps, and how they wait for each other.

By default, threads that wait spin for long. They take a core that the loader needs, so one core is left to it. With two
cores, that leaves a single thread. There, threads spin briefly and then sleep, and large steps get both cores. A thread
that sleeps at once would wake too late: on some machines, two such threads are slower than one.

Torch reads the way of waiting when it is loaded, so this module must not load it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_SPINS = "GOMP_SPINCOUNT"
THREADS = "OMP_NUM_THREADS"


def wait_briefly(environ: MutableMapping[str, str], cores: float) -> None:
    """Makes the threads of a rank with two cores spin only briefly. A choice of the user stays. Call it before torch is
    loaded."""
    if (
        environ.keys().isdisjoint((THREADS, "OMP_WAIT_POLICY"))
        and _cores_of_rank(environ, cores) == 2
    ):
        # That is a fraction of a millisecond. By default, libgomp spins 30 times as long.
        environ.setdefault(_SPINS, "10000")


def thread_count(environ: Mapping[str, str], cores: float, rows: int) -> int:
    """Returns the number of threads for steps of `rows` rows a rank."""
    own = _cores_of_rank(environ, cores)
    # With 1,024 rows a step, two threads were faster than one on each machine. With 512, it depended on the machine.
    if own == 2 and rows >= 1024 and _SPINS in environ:
        return 2
    return max(1, own - 1)


def _cores_of_rank(environ: Mapping[str, str], cores: float) -> int:
    return int(cores) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
