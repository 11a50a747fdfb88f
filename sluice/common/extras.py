"""The extras that install optional packages, for the sentence that a program prints when a package is missing."""

from __future__ import annotations

import re
from importlib import metadata

DISTRIBUTION = "sluice-recsys"
"""The name that pip knows this project by. The name `sluice` belongs to another project there."""
_PACKAGES = {
    "table": "deltalake",
    "iceberg": "pyiceberg",
    "petastorm": "petastorm fsspec six future dill diskcache zmq pandas",
    "etl": "pyspark py4j",
    "tuning": "safetensors",
    "trainer": "torchrec fbgemm_gpu tensorboardX prometheus_client",
    "serve": "uvicorn httptools",
    "ray": "ray",
}
EXTRAS = {package: extra for extra, names in _PACKAGES.items() for package in names.split()}
"""A package, by the name that it is imported by, and the least extra that holds it."""
OF_VERBS = {"train": "trainer", "evaluate": "trainer", "serve": "serve"}
"""A verb that needs more than one package, and the extra that holds all that it imports."""


_NO_DRIVER = re.compile(r"lib(nvidia|cuda|nv)[^/: ]*: cannot open shared object file")


def install_command(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def advice(error: Exception, verb: str = "") -> str:
    """Returns a sentence that names the package and the extra, or why fbgemm cannot be loaded. Empty for any other
    error."""
    if isinstance(error, OSError) and "/fbgemm_gpu/" in str(error):
        # A release loads with one release of torch: 1.5 with torch 2.10, 1.6 with 2.11, and so on. The package for GPUs
        # needs the libraries of a driver.
        reason = error.__cause__ or error.__context__ or error
        torch = metadata.version("torch")
        release = f"1.{int(torch.split('.')[1]) - 5}.*"
        if _NO_DRIVER.search(str(reason)):
            return (
                f"fbgemm-gpu cannot be loaded ({reason}), because it needs the driver of an NVIDIA GPU. Without a "
                f'GPU: pip uninstall -y fbgemm-gpu && pip install --no-deps "fbgemm-gpu-cpu=={release}"'
            )
        return (
            f"the installed fbgemm-gpu cannot be loaded ({reason}). It was built for another torch than {torch}: "
            f'pip install "torchrec=={release}" and the same release of fbgemm-gpu (fbgemm-gpu-cpu without a GPU)'
        )
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package not in EXTRAS:
        return ""
    what = f"`sluice {verb}`" if verb in OF_VERBS else "this"
    extra = OF_VERBS.get(verb, EXTRAS[package])
    return f"{what} needs {package}, which is not installed: {install_command(extra)}"
