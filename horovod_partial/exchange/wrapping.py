"""What is wrapped stays what it was: an instance of a subclass of its own class."""

from __future__ import annotations

from typing import Any


def subclass(base: type, methods: type, **members: Any) -> type:
    """A subclass of the same name, with `methods` in it, that passes for its base in what is saved."""
    body = {key: value for key, value in vars(methods).items() if key not in ("__dict__", "__weakref__")}
    return type(base.__name__, (base,), {**body, "__module__": base.__module__, "_base": base, **members})
