"""Subclasses for wrappers: a wrapped object is an instance of a subclass of its original class."""

from __future__ import annotations

from typing import Any


def subclass(base: type, methods: type, **members: Any) -> type:
    """Make a subclass with `methods` and `members`. It has its base's name and module, so saved files name the base."""
    body = {key: value for key, value in vars(methods).items() if key not in ("__dict__", "__weakref__")}
    return type(base.__name__, (base,), {**body, "__module__": base.__module__, "_base": base, **members})
