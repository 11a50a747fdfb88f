"""Tuners that others have published, as we read them, and two plain rules of thumb: to compare ours with.

Importing this registers them, so that `sluice bench --tuning autotune` and `sluice policies` take their names. It is
optional: without this folder all else works, and those programs say where the rivals are.
"""

from __future__ import annotations

from sluice.agent.policies import CEILING, register
from sluice.benchmarks.rivals.autotune import Autotune, AutotuneAdaptive
from sluice.benchmarks.rivals.bayes import Bayes
from sluice.benchmarks.rivals.cachew import Cachew
from sluice.benchmarks.rivals.cores import Cores
from sluice.benchmarks.rivals.ds2 import DS2
from sluice.benchmarks.rivals.even import Even
from sluice.benchmarks.rivals.grid import OfflineGrid
from sluice.benchmarks.rivals.hill import Hill
from sluice.benchmarks.rivals.intune import InTune
from sluice.benchmarks.rivals.intune_ceiling import Ceiling
from sluice.benchmarks.rivals.intune_teacher import hardware_of
from sluice.benchmarks.rivals.plumber import Plumber, PlumberAdaptive
from sluice.benchmarks.rivals.trident import Trident

register(
    {
        "autotune": Autotune,
        "autotune-adaptive": AutotuneAdaptive,
        "bayes": Bayes,
        "cachew": Cachew,
        "cores": Cores,
        "ds2": DS2,
        "even": Even,
        "hill": Hill,
        "intune": InTune,
        "offline-grid": OfflineGrid,
        "plumber": Plumber,
        "plumber-adaptive": PlumberAdaptive,
        "trident": Trident,
    },
    {
        "intune": lambda scenario: InTune(machine=hardware_of(scenario)),
        CEILING: lambda scenario: Ceiling(scenario.truth_at),
    },
)
