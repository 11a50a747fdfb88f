"""What a process may use of this machine: `processors` and `memory_limit`."""

from __future__ import annotations

from sluice.common.control_groups import ControlGroups


def processors() -> int:
    """Returns how many processors this process may use, by its affinity and its control group's quota."""
    return max(1, int(ControlGroups().cores()))


def memory_limit() -> int:
    """Returns how many bytes this process may use: the free memory of the machine, or less if its control groups limit
    it."""
    import psutil  # Spark's workers may not have it

    free: int = psutil.virtual_memory().available
    return min([free, *(group.limit for group in ControlGroups().limited())])
