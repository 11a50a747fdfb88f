"""How many threads compute a rank's steps, and how they wait for each other.

By default, threads that wait spin. They take a core that the loader needs, so one core is left to it. With two cores,
that leaves a single thread. There, threads wait passively: they give their core away. Large steps then get both cores.

Torch reads the way of waiting when it is loaded, so this module must not load it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

_WAIT = "OMP_WAIT_POLICY"
THREADS = "OMP_NUM_THREADS"
_LARGE_STEP = 1024
"""With so many rows a step, two threads were 1.5 times as fast as one. With 512 rows, it depended on the machine."""


def wait_passively(environ: MutableMapping[str, str], cores: float) -> None:
    """Makes the threads of a rank with two cores wait passively. A choice of the user stays. Call it before torch is
    loaded."""
    if THREADS not in environ and _cores_of_rank(environ, cores) == 2:
        environ.setdefault(_WAIT, "passive")


def thread_count(environ: Mapping[str, str], cores: float, rows: int) -> int:
    """Returns the number of threads for steps of `rows` rows a rank."""
    own = _cores_of_rank(environ, cores)
    if own == 2 and rows >= _LARGE_STEP and environ.get(_WAIT, "").lower() == "passive":
        return 2
    return max(1, own - 1)


def _cores_of_rank(environ: Mapping[str, str], cores: float) -> int:
    return int(cores) // int(environ.get("LOCAL_WORLD_SIZE", "1"))
