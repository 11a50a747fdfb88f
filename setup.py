"""Installs `sluice` with the packages that it links to, such as `sluice.etl`, and builds its compiled inner loops.

Only `sluice` comes to lie in site-packages. The compiled library uses no API of Python, so one wheel serves every
Python of a machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

import kernel_build  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
# A package index shows README without the repository: a link to a file of it stays as its words, a picture goes.
DESCRIPTION = re.sub(
    r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", README)
)


class BuildWithKernel(build_py):
    """Copies the packages, and compiles the kernel beside its source: in the checkout if it is installed in place."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            kernel_build.build(kernel_build.LIBRARY)
            return
        folder = kernel_build.LIBRARY.parent.relative_to(ROOT.resolve())
        kernel_build.build(Path(self.build_lib, folder, kernel_build.LIBRARY.name))


class WheelOfAMachine(bdist_wheel):
    """Names a wheel for every Python 3 of one kind of machine."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform.replace("linux_", "manylinux_2_28_")


class WithLibrary(Distribution):
    """Installs to the folder of packages that are made for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    long_description=DESCRIPTION,
    long_description_content_type="text/markdown",
    packages=find_packages(
        include=["sluice", "sluice.*"], exclude=["sluice.agent.lab*", "sluice.benchmarks*"]
    ),
    package_data={"": ["*.html", "*.css", "*.js", "*.json", "*.safetensors", "*.c"]},
    include_package_data=False,  # only these: what else lies beside the modules stays in the repository
    distclass=WithLibrary,
    cmdclass={"build_py": BuildWithKernel, "bdist_wheel": WheelOfAMachine},
)
