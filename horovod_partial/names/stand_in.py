"""Replaces Horovod's modules by ours when a program imports them: for `horovod-partial run`.

Horovod's front end is imported first, unchanged, because ours is made from it. When both have been imported, a third
module takes the place of Horovod's. The third module has every function, class and value of our front end, and
everything else of Horovod's. So the program, and libraries that it uses, may import the front end in any form.
Horovod's own modules keep the names that they have imported before.
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

from horovod_partial import policies
from horovod_partial.runtime.build import check_versions
from horovod_partial.settings import settings

# Horovod's front ends, each with the front end of this package that replaces it.
FRONT_ENDS = {
    "horovod.torch": "horovod_partial.torch",
    "horovod.tensorflow": "horovod_partial.tensorflow",
    "horovod.keras": "horovod_partial.keras",
    "horovod.tensorflow.keras": "horovod_partial.keras",
}
# The public modules that a front end of Horovod imports itself. They are replaced together with the front end.
# Other modules of Horovod are not replaced, because Horovod's functions import from them at each call.
# For example, `broadcast_optimizer_state` imports from `horovod.torch.optimizer`, to see if an optimizer is wrapped.
SUBMODULES = ("callbacks", "elastic")


def install(tell: Callable[[str, list[str]], None]) -> None:
    """Replace each front end of Horovod that is imported from now on.

    After each replacement, `tell` gets the front end's name, and the names in it that are ours now.
    """
    sys.meta_path.insert(0, _Finder(tell))


class _Then(Loader):
    """A loader that loads a module, then calls `then`.

    Before it loads `horovod.torch` or `horovod.tensorflow`, it checks the versions of Horovod and of the framework.
    """

    def __init__(self, loader: Loader, then: Callable[[], object]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if (framework := module.__name__.removeprefix("horovod.")) in ("torch", "tensorflow"):
            check_versions(framework)  # Horovod's library may not load with another version of the framework
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # code that reads a module's source or data calls its loader's other methods


class _Finder(MetaPathFinder):
    """Replaces Horovod's front ends after import. Python asks this finder first. This finder asks all other finders."""

    def __init__(self, tell: Callable[[str, list[str]], None]) -> None:
        self._tell = tell
        self._whole: set[str] = set()  # the names of our front ends that are completely imported
        self._replaced: set[str] = set()  # the names of Horovod's front ends that were replaced

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then: Callable[[], object]
        if fullname in FRONT_ENDS:
            then = partial(self._replace, fullname)
        elif fullname in FRONT_ENDS.values():  # a program may import both our front end and Horovod's
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
        keras = getattr(sys.modules[front_end], "keras", None) if front_end.endswith(".keras") else None
        is_legacy = keras is not None and not hasattr(keras, "ops")  # Keras 3 has `ops`
        if is_legacy and isinstance(policies.resolve(None, settings().sync), policies.Full):
            return  # our front end needs Keras 3, and on Keras 2 under `Full` Horovod's own front end is enough
        # Our front end needs Horovod's front end as an attribute of its package. Python would set it only later.
        _bind(front_end, sys.modules[front_end])
        importlib.import_module(FRONT_ENDS[front_end])
        # Our front end imports Horovod's, so ours may be half imported now. When ours is complete, this runs again.
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
    """Replace one of Horovod's modules by a new one, with the names of Horovod's module and of ours.

    Returns the names that both modules have with different values. The new module has our values.
    """
    horovods, ours = sys.modules[name], importlib.import_module(of_ours)
    public = getattr(ours, "__all__", [each for each in vars(ours) if not each.startswith("_")])
    has = {each: getattr(ours, each) for each in public if not isinstance(getattr(ours, each), ModuleType)}
    module = ModuleType(name)
    module.__dict__.update(vars(horovods) | has)
    # Let `import *` give only names of Horovod's module. A program may use our additional names for its own things.
    module.__dict__.setdefault("__all__", [each for each in vars(horovods) if not each.startswith("_")])
    sys.modules[name] = module
    _bind(name, module)
    return sorted(each for each in has if getattr(horovods, each, has[each]) is not has[each])
