"""Installs `sluice` with the packages that it links to, such as `sluice.etl`.

Only `sluice` comes to lie in site-packages."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(packages=find_packages(include=["sluice", "sluice.*"], exclude=["sluice.benchmarks*"]))
