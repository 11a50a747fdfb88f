"""Tuners that others have published, as we read them, and two plain rules of thumb: to compare ours with.

Importing this registers them, so that `sluice bench --tuning autotune` and the programs of the lab know their names.
The folder is optional: without it all else works, and those programs say where the rivals are.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.policies import CEILING, register
from sluice.agent.tunable import Policy
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
    }
)
IN_SIMULATOR: dict[str, Callable[[Scenario], Policy]] = {
    "intune": lambda scenario: InTune(
        machine=Hardware(bytes_per_s=scenario.machine.bandwidth, speed=1.0)
    ),
    CEILING: lambda scenario: Ceiling(scenario.truth_at),
}
"""Rivals that are made from the scenario if they run in the simulator."""
