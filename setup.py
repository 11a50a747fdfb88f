"""Installs `sluice` with the packages that it links to, such as `sluice.etl`.

Only `sluice` comes to lie in site-packages."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md").read_text("utf-8")
# A package index shows README without the repository: a link to a file of it stays as its words, a picture goes.
DESCRIPTION = re.sub(
    r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", README)
)

setup(
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    packages=find_packages(
        include=["sluice", "sluice.*"], exclude=["sluice.agent.lab*", "sluice.benchmarks*"]
    ),
    package_data={"": ["*.html", "*.css", "*.js", "*.json", "*.safetensors"]},
    include_package_data=False,  # only these: what else lies beside the modules stays in the repository
)
