"""What a process may use of this machine, as whole processors and bytes: `processors`, `memory_limit`; and
`this_machine`, which knows it again."""

from __future__ import annotations

import hashlib
import platform

from sluice.common.control_groups import ControlGroups


def this_machine() -> str:
    """A short name by which a machine is known again, and which does not say what it is called."""
    return hashlib.sha256(f"{platform.node()} {processors()}".encode()).hexdigest()[:16]


def processors() -> int:
    """How many processors this process may use, by its affinity and its control group's quota."""
    return max(1, int(ControlGroups().cores()))


def memory_limit() -> int:
    """How many bytes this process may use: what the machine has free, and what its control groups may have."""
    import psutil  # Spark's workers may not have it

    free: int = psutil.virtual_memory().available
    return min([free, *(group.limit for group in ControlGroups().limited())])
