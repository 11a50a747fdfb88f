"""The planted faults of `python -m tests.bed` still fit the sources."""

from collections import Counter

from tests.bed.faults import ROOMS, read_faults


def test_every_fault_can_be_planted():
    faults = {room: read_faults(room) for room in ROOMS}
    for room, planted in faults.items():
        for fault in planted:
            problem = fault.problem()
            assert not problem, (
                f"{fault.name}: {problem}; if you changed or moved it, change the fault in "
                f"tests/bed/{room}.toml likewise, or delete it with the code"
            )
            assert fault.old != fault.new
    names = Counter(fault.name for planted in faults.values() for fault in planted)
    assert [name for name, times in names.items() if times > 1] == []
