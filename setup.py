"""Build the extensions with CMake; everything else about the package is in pyproject.toml."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

missing = [name for name in ("scikit-build-core", "pybind11") if not find_spec(name.replace("-", "_"))]
if missing:
    sys.exit(f"error: Building horovod-partial needs {' and '.join(missing)}; run `pip install {' '.join(missing)}`.")

import horovod_info
from install_horovod import SetupError
from scikit_build_core.setuptools.build_cmake import BuildCMake
from setuptools import setup


class BuildExtensions(BuildCMake):
    """Tell CMake which Horovod is installed."""

    def run(self) -> None:
        if self.editable_mode:
            return  # `make build` puts the extensions into the source tree, and only compiles what has changed
        if not shutil.which(os.environ.get("CXX", "c++")):
            sys.exit("error: Building horovod-partial needs a C++ compiler; install g++, or set CXX.")
        info = Path(self.build_temp or "build").resolve() / "info"
        try:
            horovod_info.write(info)
        except SetupError as error:
            sys.exit(f"error: {error}")
        self.cmake_args = [*(self.cmake_args or []), f"-DHOROVOD_PARTIAL_INFO={info}"]
        super().run()


setup(cmake_source_dir=".", cmdclass={"build_cmake": BuildExtensions})
