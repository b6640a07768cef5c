"""Builds the extension `hybridgen._C`; everything else about the package is in pyproject.toml.

`python3 setup.py build_ext --inplace` needs a C++17 compiler (GCC 12 or newer), pybind11 and no network.
"""

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def files(pattern: str) -> list[str]:
    """Paths of the extension's files, relative to this one, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cpp_ext").rglob(pattern))


class BuildExtension(build_ext):
    """Says in one line what is missing. pybind11 is needed only here, not to read the metadata."""

    def build_extensions(self) -> None:
        try:
            import pybind11
        except ImportError:
            raise SystemExit("error: hybridgen's extension needs pybind11: pip install pybind11") from None
        compiler = self.compiler.compiler_so[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"error: hybridgen's extension needs a C++17 compiler, and '{compiler}' was not found: "
                "install g++ 12 or newer, or set CC and CXX"
            )
        for extension in self.extensions:
            extension.include_dirs.append(pybind11.get_include())
        super().build_extensions()


# No -m flags: one file holds every ISA, each in a `#pragma GCC target` region; the CPU is asked at run time.
FLAGS = ["-std=c++17", "-O3", "-g0", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]

os.chdir(ROOT)
setup(
    ext_modules=[
        Extension(
            "hybridgen._C",
            sources=files("*.cpp"),
            depends=files("*.h"),
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
