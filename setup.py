"""Installs the rooms, which lie at the top of the checkout, as `sluice.etl`, `sluice.ingest`, `sluice.agent` and
`sluice.dlrm`: nothing else than `sluice` comes to lie in site-packages."""

from __future__ import annotations

from setuptools import find_packages, setup

ROOMS = ("etl", "ingest", "agent", "dlrm")

setup(
    packages=["sluice", *(f"sluice.{name}" for room in ROOMS for name in (room, *(
        f"{room}.{inner}" for inner in find_packages(room))))],
    package_dir={"sluice": "sluice", **{f"sluice.{room}": room for room in ROOMS}})
