"""Replaces Horovod's modules by ours when a program imports them: for `horovod-partial run`.

Horovod's front end is imported first, unchanged, because ours is made from it. When both have been imported, a third
module takes the place of Horovod's. It has every function, class and value of our front end, and all else from
Horovod's. So the program, and libraries that it uses, may import the front end in any form. Names that Horovod's own
modules have imported before stay Horovod's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Horovod's front ends, each with the front end of this package that replaces it.
FRONT_ENDS = {
    "horovod.torch": "horovod_partial.torch",
    "horovod.tensorflow": "horovod_partial.tensorflow",
    "horovod.keras": "horovod_partial.keras",
    "horovod.tensorflow.keras": "horovod_partial.keras",
}
# The public modules that each front end imports itself; they are replaced too. Other modules stay Horovod's, because
# Horovod's functions import from them when they are called. For example, Horovod's functions find out whether an
# optimizer is wrapped by `horovod.torch.optimizer`.
SUBMODULES = ("callbacks", "elastic")


def install(tell: Callable[[str, list[str]], None]) -> None:
    """Replace each front end of Horovod that is imported from now on.

    Args:
        tell: is called after each replacement, with the front end's name, and the names in it that are ours now.
    """
    sys.meta_path.insert(0, _Finder(tell))


class _Then(Loader):
    """A loader that calls a function after it has loaded a module."""

    def __init__(self, loader: Loader, then: Callable[[], object]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # readers of resources and sources use the loader's other methods


class _Finder(MetaPathFinder):
    """Replaces front ends after their import. Python asks this finder first; it lets the other finders find the module."""

    def __init__(self, tell: Callable[[str, list[str]], None]) -> None:
        self._tell = tell
        self._whole: set[str] = set()  # names of our front ends whose import is complete
        self._replaced: set[str] = set()  # names of Horovod's front ends whose place has been taken

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then: Callable[[], object]
        if fullname in FRONT_ENDS:
            then = partial(self._replace, fullname)
        elif fullname in FRONT_ENDS.values():  # a program may import front ends of this package and of Horovod
            then = partial(self._replace_those_of, fullname)
        else:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, then)
                return spec
        return None

    def _replace_those_of(self, ours: str) -> None:
        self._whole.add(ours)
        for front_end, stands in FRONT_ENDS.items():
            if stands == ours and front_end in sys.modules:
                self._replace(front_end)

    def _replace(self, front_end: str) -> None:
        # Our front end needs Horovod's as an attribute of its package. Python would set this attribute only later.
        _bind(front_end, sys.modules[front_end])
        importlib.import_module(FRONT_ENDS[front_end])
        # Our front end imports Horovod's. If this runs within that import, it runs again when ours is complete.
        if front_end in self._replaced or FRONT_ENDS[front_end] not in self._whole:
            return
        self._replaced.add(front_end)
        self._tell(front_end, _take_place(front_end, FRONT_ENDS[front_end]))
        for within in SUBMODULES:
            if f"{front_end}.{within}" in sys.modules:
                _take_place(f"{front_end}.{within}", f"{FRONT_ENDS[front_end]}.{within}")


def _bind(name: str, module: ModuleType) -> None:
    parent, _, own = name.rpartition(".")
    setattr(sys.modules[parent], own, module)


def _take_place(name: str, of_ours: str) -> list[str]:
    """Replace one of Horovod's modules by one that has the names of ours, too.

    Returns the names that Horovod's module has too, but with other values.
    """
    horovods, ours = sys.modules[name], importlib.import_module(of_ours)
    public = getattr(ours, "__all__", [each for each in vars(ours) if not each.startswith("_")])
    has = {each: getattr(ours, each) for each in public if not isinstance(getattr(ours, each), ModuleType)}
    module = ModuleType(name)
    module.__dict__.update(vars(horovods) | has)
    # `import *` imports the same names as from Horovod's module, because a program may use our additional names itself.
    module.__dict__.setdefault("__all__", [each for each in vars(horovods) if not each.startswith("_")])
    sys.modules[name] = module
    _bind(name, module)
    return sorted(each for each in has if getattr(horovods, each, has[each]) is not has[each])
