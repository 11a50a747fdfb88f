"""Who may know whom (the table in docs/architecture.md), read from the sources; and that contracts stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("etl", "ingest", "agent", "dlrm")
SHARED_WITH_AGENT = {"ingest.knobs", "ingest.stats", "ingest.plan", "ingest.machine"}
CONTRACTS_OF_ETL = {"etl.table", "etl.spec", "etl.ops", "etl.fields", "etl.names", "etl.permission", "etl.code_options"}
# Composition roots: they may import every room, and nobody imports them.
PROGRAMS = {"etl.job", "etl.__main__", "ingest.__main__", "ingest.bench", "ingest.headroom_command", "agent.__main__",
            "agent.evaluate", "agent.train", "dlrm.train", "dlrm.evaluate", "dlrm.serve", "dlrm.plan", "dlrm.__main__",
            "dlrm.convert", "dlrm.demo", "dlrm.export", "dlrm.search", "dlrm.trial"}
FOR_PROGRAMS = {"etl.program"}
LIGHT = ("etl.table", "etl.spec", "etl.ops", "etl.fields", "ingest.knobs", "ingest.stats", "ingest.plan",
         "ingest.machine", "agent.tunable", "agent.controller", "agent.policies")
HEAVY = ("pyspark", "torch", "petastorm", "torchrec", "pandas")


def modules() -> dict[str, Path]:
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], module_level_only: bool = False) -> set[str]:
    """Our modules and foreign top-level packages that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if module_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known.keys()) or {str(node.module)}
    return found


def allowed(importer: str, imported: str) -> bool:
    source, target = importer.split(".")[0], imported.split(".")[0]
    if target not in ROOMS:
        return True
    if imported in PROGRAMS:
        # A room's `python -m` entry, and what starts trainers for a search, may hand over to the room's own programs.
        return source == target and importer.endswith(("__main__", "dlrm.trial"))
    if importer in PROGRAMS:
        return True
    if imported in FOR_PROGRAMS:
        return False
    if source == target:
        return True
    if source == "ingest":
        return imported in CONTRACTS_OF_ETL or imported.startswith("etl.ops.")
    if source == "agent":
        return imported in SHARED_WITH_AGENT
    return source == "dlrm"


def test_every_import_follows_the_table():
    known = modules()
    wrong = [f"{importer} imports {imported}" for importer, path in known.items()
             for imported in imports(path, known) if not allowed(importer, imported)]
    assert not wrong, "\n".join(wrong)


def test_the_table_is_complete():
    """Every program named here exists once its room has it, and a new top-level package must be listed."""
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert packages <= {*ROOMS, "tests", "benchmarks"}, packages


def test_what_the_agent_shares_is_standard_library_and_numpy():
    known = modules()
    for name in (SHARED_WITH_AGENT | {"etl.names"}) & known.keys():
        foreign = {i.split(".")[0] for i in imports(known[name], known) - {"etl.names"}}
        foreign -= {*sys.stdlib_module_names, "numpy"}
        assert foreign <= {"ingest"}, f"{name} imports {foreign}"


def test_exactly_one_file_imports_petastorm():
    known = modules()
    users = {n for n, p in known.items() if any(i.split(".")[0] == "petastorm" for i in imports(p, known))}
    assert len(users) <= 1 or users <= {"ingest.source", "ingest.petastorm_on_arrow"}, users


@pytest.mark.parametrize("name", LIGHT)
def test_importing_a_contract_stays_light(name):
    if name not in modules():
        pytest.fail(f"{name} is promised by the architecture but does not exist")
    code = f"import sys, {name}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]", result.stdout


def test_the_image_holds_what_set_up_installs_and_every_room():
    image, setup = (ROOT / "docker" / "Dockerfile").read_text(), (ROOT / ".ci" / "setup").read_text()
    torch = re.findall(r"\btorch==\S+", setup)
    assert re.findall(r"\btorch==\S+", image) == torch != []
    assert set(re.findall(r"^COPY (\w+) \1$", image, re.MULTILINE)) == set(ROOMS)
