"""Build the extensions with CMake; everything else about the package is in pyproject.toml."""

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

missing = [name for name in ("scikit-build-core", "pybind11") if not find_spec(name.replace("-", "_"))]
if missing:
    sys.exit(f"error: Building horovod-partial needs {' and '.join(missing)}; run `pip install {' '.join(missing)}`.")

from scikit_build_core.setuptools.build_cmake import BuildCMake
from setuptools import setup
from setuptools.command.dist_info import dist_info

ASK = Path(__file__).resolve().parent / "tools" / "horovod_info.py"


def ask_horovod(*arguments: object) -> None:
    """Ask the Horovod of the environment that is installed into, which pip hides from a build, or end with what is missing."""
    hidden = sysconfig.get_path("purelib") not in sys.path
    names = {"PYTHONPATH", "PYTHONNOUSERSITE"} if hidden else set()
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if subprocess.run([sys.executable, ASK, *map(str, arguments)], check=False, env=environment).returncode != 0:
        sys.exit(1)  # the reason has been told


class DescribeFirst(dist_info):  # type: ignore[misc]  # setuptools is not typed
    """Look for Horovod before pip does, which would try to build the release that does not fit today's frameworks."""

    def run(self) -> None:
        ask_horovod()
        super().run()


class BuildExtensions(BuildCMake):
    """Tell CMake which Horovod is installed."""

    def run(self) -> None:
        if self.editable_mode:
            return  # `make build` puts the extensions into the source tree, and only compiles what has changed
        info = Path(self.build_temp or "build").resolve() / "info"
        ask_horovod(info)
        self.cmake_args = [*(self.cmake_args or []), f"-DHOROVOD_PARTIAL_INFO={info}"]
        super().run()


setup(cmake_source_dir=".", cmdclass={"build_cmake": BuildExtensions, "dist_info": DescribeFirst})
