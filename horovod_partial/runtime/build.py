"""Checks that this build of the package fits the installed Horovod and framework."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from horovod_partial import _build_info as built  # the build of this package writes `_build_info`

_AGAIN = "`pip install --force-reinstall --no-deps .`"


def check_versions(framework: str) -> None:
    """Raise an ImportError if this build is for other versions of Horovod or the framework, before Horovod is loaded.

    Horovod's library is built for one version of the framework, and might not even load with another.
    """
    options = [f"--{name}" for name in ("gloo", "mpi", "nccl") if name in built.FEATURES]
    command = " ".join(["python tools/install_horovod.py", *options])
    both_again = f"in the source of horovod_partial run `{command}`, then {_AGAIN}"
    found = importlib.metadata.version("horovod")
    if found != built.HOROVOD_VERSION:
        raise ImportError(
            f"horovod_partial was built for Horovod {built.HOROVOD_VERSION}, but {found} is installed; {both_again}"
        )
    expected = built.FRAMEWORKS.get(framework)
    if expected is None:
        raise ImportError(f"horovod_partial was built where Horovod had no {framework}; {both_again}")
    version = importlib.import_module(framework).__version__
    if version != expected:
        raise ImportError(
            f"horovod_partial was built for {framework} {expected}, but {version} is installed; {both_again}"
        )


def check_features(mpi_ops: ModuleType) -> None:
    """Raise an ImportError if the loaded Horovod has other features than when this package was built."""
    known = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")
    features = [name for name in known if getattr(mpi_ops, name + "_built")()]
    if set(features) != set(built.FEATURES).intersection(known):
        raise ImportError(
            f"horovod_partial was built for a Horovod with {', '.join(built.FEATURES)}, but the installed one has "
            f"{', '.join(features)}; in the source of horovod_partial run {_AGAIN}"
        )
