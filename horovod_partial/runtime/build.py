"""Checks that this build of the package fits the installed Horovod and framework."""

from __future__ import annotations

import importlib.metadata
import os
from types import ModuleType

_REINSTALL = "reinstall it from its source: pip install --force-reinstall --no-deps"


def check_build(framework: str, version: str, mpi_ops: ModuleType) -> None:
    from horovod_partial import _build_info as built  # the build of this package writes `_build_info`

    found = importlib.metadata.version("horovod")
    if found != built.HOROVOD_VERSION:
        raise ImportError(
            f"horovod_partial was built for Horovod {built.HOROVOD_VERSION}, but {found} is installed; {_REINSTALL}"
        )
    expected = built.FRAMEWORKS.get(framework)
    if expected is None:
        raise ImportError(f"horovod_partial was built where Horovod had no {framework}; {_REINSTALL}")
    if version != expected:
        raise ImportError(
            f"horovod_partial was built for {framework} {expected}, but {version} is installed; {_REINSTALL}"
        )
    known = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")
    features = [name for name in known if getattr(mpi_ops, name + "_built")()]
    if set(features) != set(built.FEATURES).intersection(known):
        raise ImportError(
            f"horovod_partial was built for a Horovod with {', '.join(built.FEATURES)}, but the installed one has "
            f"{', '.join(features)}; {_REINSTALL}"
        )


def library_of(mpi_lib: ModuleType) -> str:
    """Return the path of a framework's Horovod library, in the form that the dynamic linker knows."""
    return os.path.abspath(str(mpi_lib.__file__))
