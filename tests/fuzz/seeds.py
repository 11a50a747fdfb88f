"""`seed_of_code`: the first seed that the tests try."""

import hashlib
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def seed_of_code() -> int:
    """A number that the code of the product and of the fuzzers decides. A test that begins with it tries other seeds
    after every change of the code, and the same seeds whenever it runs on the same code."""
    sources = {
        path
        for package in _ROOT.glob("*/__init__.py")
        if package.parent.name != "tests"
        for path in package.parent.rglob("*.py")
    }
    digest = hashlib.sha256()
    for path in sorted(sources | set((_ROOT / "tests" / "fuzz").glob("*.py"))):
        digest.update(
            f"{path.relative_to(_ROOT).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return int.from_bytes(digest.digest()[:8]) % 10**9
