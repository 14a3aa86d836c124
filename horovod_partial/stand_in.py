"""Modules that stand where a program imports Horovod's: for `horovod-partial run`.

A front end of Horovod stays what it is while it is being imported, since ours is made from it. When both are there, a module
takes its place in which every function, class and value that ours has is ours, and all else is Horovod's. So it does not matter
in which form a program imports it, nor whether the program does or a library that it uses. What Horovod's own modules have
imported by then stays theirs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Whose place is taken, and by what.
FRONT_ENDS = {
    "horovod.torch": "horovod_partial.torch",
    "horovod.tensorflow": "horovod_partial.tensorflow",
    "horovod.keras": "horovod_partial.keras",
    "horovod.tensorflow.keras": "horovod_partial.keras",
}
# Of each, the public ones, which it imports itself. The others stay as they are: Horovod's own functions import from them
# when they are called, and ask `horovod.torch.optimizer`, say, whether an optimizer is a wrapped one.
SUBMODULES = ("callbacks", "elastic")


def install(tell: Callable[[str, list[str]], None]) -> None:
    """From now on ours stands for each front end of Horovod that is imported.

    Args:
        tell: called when that has come to pass, with the front end's name, and the names in it that are ours now.
    """
    sys.meta_path.insert(0, _Finder(tell))


class _Then(Loader):
    """A loader after which something else happens."""

    def __init__(self, loader: Loader, then: Callable[[], object]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # as resources and sources are asked for


class _Finder(MetaPathFinder):
    """Comes first, and leaves the finding to the others."""

    def __init__(self, tell: Callable[[str, list[str]], None]) -> None:
        self._tell = tell
        self._whole: set[str] = set()  # front ends of ours whose import is over
        self._replaced: set[str] = set()  # front ends of Horovod's

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = self._what_follows(fullname)
        if then is None:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, then)
                return spec
        return None

    def _what_follows(self, name: str) -> Callable[[], object] | None:
        """What is to happen when this module has been imported."""
        if name in FRONT_ENDS:
            return lambda: self._replace(name)
        if name in FRONT_ENDS.values():  # a program that imports ours may import Horovod's as well
            return lambda: self._replace_those_of(name)
        return None

    def _replace_those_of(self, ours: str) -> None:
        self._whole.add(ours)
        for front_end, stands in FRONT_ENDS.items():
            if stands == ours and front_end in sys.modules:
                self._replace(front_end)

    def _replace(self, front_end: str) -> None:
        _bind(front_end, sys.modules[front_end])  # ours needs it, and the import does so when it is over only
        importlib.import_module(FRONT_ENDS[front_end])
        if front_end in self._replaced or FRONT_ENDS[front_end] not in self._whole:  # else its import has led here
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
    """Put a module with our names in the place of one of Horovod's; returns those that Horovod's had as well."""
    horovods, ours = sys.modules[name], importlib.import_module(of_ours)
    public = getattr(ours, "__all__", [each for each in vars(ours) if not each.startswith("_")])
    has = {each: getattr(ours, each) for each in public if not isinstance(getattr(ours, each), ModuleType)}
    module = ModuleType(name)
    module.__dict__.update(vars(horovods) | has)
    # What a star brings is what it brought: our further names may be the program's own.
    module.__dict__.setdefault("__all__", [each for each in vars(horovods) if not each.startswith("_")])
    sys.modules[name] = module
    _bind(name, module)
    return sorted(each for each in has if getattr(horovods, each, has[each]) is not has[each])
