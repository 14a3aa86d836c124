"""Makes the classes of wrapped optimizers and tapes: subclasses of the wrapped object's own class."""

from __future__ import annotations

from typing import Any


def subclass(base: type, methods: type, **members: Any) -> type:
    """Return a subclass of `base` with the methods of a class and further members.

    The subclass has the name and the module of `base`, so that saved files name `base`.
    """
    body = {key: value for key, value in vars(methods).items() if key not in ("__dict__", "__weakref__")}
    return type(base.__name__, (base,), {**body, "__module__": base.__module__, "_base": base, **members})
