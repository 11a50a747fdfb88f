"""Tuners that others have published, as we read them, and two plain rules of thumb: to compare ours with.

Importing this registers them, so that `sluice bench --tuning autotune` and `sluice policies` take their names. It is
optional: without this folder all else works, and those programs say where the rivals are.
"""

from __future__ import annotations

from sluice.agent.policies import CEILING, register
from sluice.benchmarks.rivals.autotune import Autotune
from sluice.benchmarks.rivals.cores import Cores
from sluice.benchmarks.rivals.even import Even
from sluice.benchmarks.rivals.intune import Hardware, InTune
from sluice.benchmarks.rivals.intune_ceiling import Ceiling
from sluice.benchmarks.rivals.plumber import Plumber

register(
    {
        "autotune": Autotune,
        "cores": Cores,
        "even": Even,
        "intune": InTune,
        "plumber": Plumber,
    },
    {
        "intune": lambda scenario: InTune(
            machine=Hardware(bytes_per_s=scenario.machine.bandwidth, speed=scenario.machine.speed)
        ),
        CEILING: lambda scenario: Ceiling(scenario.truth_at),
    },
)
