"""Gives this package every module of Horovod's front ends, so programs can import it in place of `horovod`.

    from horovod_partial.torch.elastic.sampler import ElasticSampler

A module that only Horovod has is made when it is imported. It has the contents of Horovod's module, except that
functions and classes that our front end has under the same name are ours. For example, `horovod_partial.torch.mpi_ops`
has our `init`. `horovod_partial.tensorflow.keras` has the contents of `horovod_partial.keras`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OURS = __name__.partition(".")[0]
_FRONT_ENDS = ("torch", "tensorflow", "keras")


class _Counterpart(importlib.abc.Loader):
    """Makes a module like `source`, but with the functions and classes that `front_end` has under the same names."""

    def __init__(self, source: str, front_end: str) -> None:
        self._source = source
        self._front_end = front_end

    def exec_module(self, module: ModuleType) -> None:
        source, front_end = importlib.import_module(self._source), importlib.import_module(self._front_end)
        module.__doc__ = source.__doc__
        for name, value in vars(source).items():
            if name.startswith("__") and name != "__all__":
                continue
            ours = getattr(front_end, name, value)
            setattr(module, name, ours if callable(ours) else value)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that Horovod has and that are not files of `horovod_partial`. Python asks this finder last."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, within = fullname.partition(".")
        front_end, _, submodule = within.partition(".")
        if package != _OURS or front_end not in _FRONT_ENDS or not submodule:
            return None
        source = f"horovod.{within}"
        if f"{within}.".startswith("tensorflow.keras."):
            front_end = "keras"
            source = f"{_OURS}.{within.removeprefix('tensorflow.')}"
        found = importlib.util.find_spec(source)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        loader = _Counterpart(source, f"{_OURS}.{front_end}")
        return importlib.util.spec_from_loader(fullname, loader, is_package=is_package)


sys.meta_path.append(_Finder())


def listing(names: list[str]) -> Callable[[], list[str]]:
    """Return a front end's `__dir__`, which lists `names` only, and leaves out the front end's own modules."""
    return lambda: sorted(names)


def bind(front_end: ModuleType, horovods: ModuleType) -> None:
    """Replace Horovod's modules, such as `horovod.torch.mpi_ops`, among the attributes of `front_end` by our modules.

    A front end's `from horovod.torch import *` makes Horovod's modules attributes of the front end. If they stayed,
    `from horovod_partial.torch import mpi_ops` would import Horovod's module, not ours.

    This also adds Horovod's public names to the front end's `__all__`, so that `import *` gives all that Horovod's gives.
    """
    for name, value in list(vars(horovods).items()):
        if isinstance(value, ModuleType) and value.__name__ == f"{horovods.__name__}.{name}":
            setattr(front_end, name, importlib.import_module(f"{front_end.__name__}.{name}"))
    exported = front_end.__all__
    exported.extend(name for name in dir(horovods) if not name.startswith("_") and name not in exported)
