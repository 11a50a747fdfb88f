"""Who may know whom (the table in docs/architecture.md), read from the sources; that contracts stay light; and that a
stranger finds things: small folders, one home for each class name."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.run_program import run_program

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("etl", "ingest", "agent", "dlrm")
SHARED, TOOLS = "common", "tools"
HEIGHTS = {name: height for height, name in enumerate((SHARED, *ROOMS, TOOLS))}
"""The packages from the ground up: none imports one above it, but for programs."""
MOST_FILES = 20
SHARED_WITH_AGENT = {
    "sluice.ingest.choices",
    "sluice.ingest.knobs",
    "sluice.ingest.stats",
    "sluice.ingest.stage_spec",
    "sluice.ingest.permutations",
    "sluice.ingest.row_order",
    "sluice.ingest.machine",
}
CONTRACTS_OF_ETL = (
    "sluice.etl.table.table",
    "sluice.etl.table.table_files",
    "sluice.etl.table.table_columns",
    "sluice.etl.table.foreign_tables",
    "sluice.etl.spec.spec",
    "sluice.etl.spec.permission",
    "sluice.etl.spec.code_options",
    "sluice.etl.spec.table_transform",
    "sluice.etl.spec.input_section",
    "sluice.etl.spec.nested_columns",
    "sluice.etl.spec.row_split",
    "sluice.etl.apply.cells",
    "sluice.etl.ops",
    "sluice.etl.schema",
)
# Composition roots: they may import every room, and nobody imports them.
PROGRAMS = {
    "sluice.etl.job",
    "sluice.etl.__main__",
    "sluice.ingest.__main__",
    "sluice.ingest.remote.worker",
    "sluice.agent.__main__",
    "sluice.agent.lab.faults.__main__",
    "sluice.agent.lab.judge",
    "sluice.agent.lab.simulate",
    "sluice.dlrm.train",
    "sluice.dlrm.evaluate",
    "sluice.dlrm.serve",
    "sluice.dlrm.plan",
}
FOR_PROGRAMS = {"sluice.common.program"}
STORES = "sluice.common.stores"
"""Imports Arrow and fsspec once it opens a store."""
LIGHT = (
    "sluice",
    "sluice.etl.table.table",
    "sluice.etl.spec.spec",
    "sluice.etl.ops",
    "sluice.etl.schema",
    "sluice.ingest.knobs",
    "sluice.ingest.stats",
    "sluice.ingest.stage_spec",
    "sluice.ingest.row_order",
    "sluice.ingest.machine",
    "sluice.agent.tunable",
    "sluice.agent.controller",
    "sluice.agent.policies",
)
HEAVY = ("pyspark", "torch", "petastorm", "torchrec", "pandas")


def modules() -> dict[str, Path]:
    by_name = {}
    for package in (*ROOMS, f"sluice/{SHARED}", f"sluice/{TOOLS}"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            inside = parts[1:] if parts[0] == "sluice" else parts
            by_name[
                ".".join(("sluice", *(inside[:-1] if inside[-1] == "__init__" else inside)))
            ] = path
    return by_name


def with_facade() -> dict[str, Path]:
    """The modules, and the files of `sluice` itself."""
    facade = {f"sluice.{path.stem}": path for path in sorted((ROOT / "sluice").glob("*.py"))}
    return {**modules(), **facade}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def statements(node: ast.AST, with_types: bool = True) -> Iterator[ast.AST]:
    """What stands in it, at any depth, but for expressions, in which nothing is imported or defined."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr) and (with_types or not is_for_types_only(child)):
            yield child
            yield from statements(child, with_types)


@cache
def import_nodes(path: Path, with_types: bool = True) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(
        node
        for node in statements(tree(path), with_types)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def imports(path: Path, known: dict[str, Path], with_types: bool = True) -> set[str]:
    """Our modules and foreign top-level packages that a file imports, anywhere in it."""
    names_imported: set[str] = set()
    for node in import_nodes(path, with_types):
        if isinstance(node, ast.Import):
            names_imported.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: write imports in full"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            names_imported.update((names & known.keys()) or {str(node.module)})
    return names_imported


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("sluice.") else ""


def allowed(importer: str, imported: str) -> bool:
    source, target = room_of(importer), room_of(imported)
    if (
        target not in HEIGHTS or importer == f"sluice.{source}"
    ):  # a package's own face may show what it holds
        return True
    if imported in PROGRAMS:
        # A package's `python -m` entry may hand over to programs, its own and those of tools.
        return importer.endswith("__main__") and target in (source, TOOLS)
    if importer in PROGRAMS or source == TOOLS:
        return True
    if imported in FOR_PROGRAMS:
        return False
    if target in (source, SHARED):
        return True
    if source == "ingest":
        return imported.startswith(CONTRACTS_OF_ETL)
    if source == "agent":
        return imported in SHARED_WITH_AGENT
    return HEIGHTS[target] < HEIGHTS[source] and source == "dlrm"


def test_every_import_follows_the_table():
    known = modules()
    wrong = [
        f"{importer} imports {imported}"
        for importer, path in known.items()
        for imported in imports(path, known)
        if not allowed(importer, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_imported_by_its_folder_alone():
    """A user's own `agent/` or `etl/` must not come in our way: our rooms are parts of `sluice`."""
    known = modules()
    others = {
        str(p.relative_to(ROOT)): p
        for folder in ("tests", "benchmarks", "examples", "sluice")
        for p in (ROOT / folder).rglob("*.py")
    }
    wrong = [
        f"{name} imports {imported}"
        for name, path in {**known, **others}.items()
        for imported in imports(path, known)
        if imported.split(".")[0] in ROOMS
    ]
    assert not wrong, "\n".join(wrong)


def parts_of(path: Path) -> tuple[str, ...]:
    """The package, its folders and the file, wherever the package lies."""
    parts = path.relative_to(ROOT).parts
    return parts[1:] if parts[0] == "sluice" else parts


def floor_of(path: Path) -> str:
    """A folder within its room, with its face; or a file at the room's top."""
    inside = parts_of(path)[1:-1]
    return "/".join(inside) if inside else path.stem


def test_what_stands_on_a_floor_imports_what_is_below_it():
    known = modules()
    block = re.search(r"```floors\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)
    assert block
    floors = {
        room: {
            name: number for number, names in enumerate(line.split("<")) for name in names.split()
        }
        for room, line in (line.split(":") for line in block.group(1).strip().splitlines())
    }
    there: dict[str, set[str]] = defaultdict(set)
    wrong = []
    for name, path in known.items():
        room, here = room_of(name), floor_of(path)
        if (
            name == f"sluice.{room}" or room not in ROOMS
        ):  # the package's own face; and what has no floors
            continue
        there[room].add(here)
        for target in imports(path, known, with_types=False) & known.keys():
            below = floor_of(known[target])
            if (
                room_of(target) == room
                and target != f"sluice.{room}"
                and below != here
                and floors[room].get(below, 99) >= floors[room].get(here, -1)
            ):
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)
    assert {room: set(names) for room, names in floors.items()} == there, (
        "docs/architecture.md names every floor"
    )


def test_no_folder_holds_more_than_a_glance():
    crowded = {}
    for folder in {path.parent for path in modules().values()}:
        files = [p for p in folder.glob("*.py") if p.name != "__init__.py"]
        if len(files) > MOST_FILES:
            crowded[str(folder.relative_to(ROOT))] = len(files)
    assert not crowded, crowded


def test_a_class_name_has_one_home():
    homes = defaultdict(list)
    for name, path in with_facade().items():
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(name)
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def test_nothing_counts_references_or_asks_the_collector_who_refers_to_what():
    """Each release of CPython may count otherwise. 3.14 borrows references that 3.13 counts."""
    counts = {"getrefcount", "gettotalrefcount", "get_referrers", "get_referents", "getobjects"}
    found = {
        f"{name}: {word}"
        for name, path in with_facade().items()
        for node in ast.walk(tree(path))
        for word in (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", ""))
        if word in counts
    }
    assert found == set()


def test_messages_are_printed_by_say_alone():
    """So names are shown safely, and --log-format reaches every message."""
    found = [
        f"{name}: line {node.lineno}"
        for name, path in with_facade().items()
        if name != "sluice.common.lines"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and "stderr" in "".join(map(ast.dump, node.keywords))
        and "print" in ast.dump(node.func) + "".join(map(ast.dump, node.args))
    ]
    assert not found


def test_the_table_is_complete():
    """Every program named here exists, and a new top-level package must be listed."""
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert packages <= {*ROOMS, "sluice", "tests", "benchmarks", "examples"}, packages
    assert modules().keys() >= PROGRAMS


def test_what_the_agent_shares_is_standard_library_numpy_and_psutil():
    known = modules()
    shared = {name for name in known if room_of(name) == SHARED} - FOR_PROGRAMS
    for name in SHARED_WITH_AGENT | shared:
        foreign = {
            i.split(".")[0]
            for i in imports(known[name], known)
            if i not in SHARED_WITH_AGENT | shared
        } - {*sys.stdlib_module_names, "numpy", "psutil"}
        assert foreign <= ({"pyarrow", "fsspec"} if name == STORES else set()), (
            f"{name} imports {foreign}"
        )


def test_petastorm_and_spark_are_imported_in_one_place_each():
    known = modules()
    places = {
        "petastorm": re.compile(r"sluice\.ingest\.read\.petastorm\.(compat|options|source)"),
        "pyspark": re.compile(r"sluice\.etl\.spark\..*"),
    }
    for package, place in places.items():
        users = {
            name
            for name, path in known.items()
            if any(i.split(".")[0] == package for i in imports(path, known, with_types=False))
        }
        assert not [name for name in users if not place.fullmatch(name)]


def test_importing_the_contracts_stays_light():
    """Each module is imported after those before it, and the first one that brings a large library is named."""
    code = f"""
import importlib, sys
for name in {LIGHT!r}:
    importlib.import_module(name)
    assert not {{*{HEAVY!r}}} & sys.modules.keys(), name
importlib.import_module("sluice.ingest.remote.maker")
assert "torch" not in sys.modules, "remote workers would take seconds to start"
"""
    run_program("-c", code, check=True)


def test_what_sparks_workers_import_needs_pyarrow_and_numpy_alone():
    """`import` finds no module whose entry is None."""
    code = """
import sys
sys.modules |= dict.fromkeys(("deltalake", "torch", "petastorm", "torchrec", "pandas", "psutil"))
import sluice.etl.spark.fit, sluice.etl.spark.side_tables, sluice.etl.spark.write
"""
    run_program("-c", code, check=True)


def test_the_image_holds_what_set_up_installs_and_every_package():
    image, setup = (
        (ROOT / "docker" / "Dockerfile").read_text(),
        (ROOT / ".ci" / "setup").read_text(),
    )
    torch = re.findall(r"\btorch==\S+", setup)
    assert re.findall(r"\btorch==\S+", image) == torch != []
    assert set(re.findall(r"^COPY (\w+) \1$", image, re.MULTILINE)) == {"sluice", *ROOMS}
