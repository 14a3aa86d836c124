"""Keeps PyTorch's compiler out of ranks that compile nothing.

The first optimizer of a process imports the compiler, only to tell it that it must leave optimizers alone. The import
takes seconds of a core, and most launches have more ranks than there are cores.
"""

import sys
import types
from collections.abc import Callable
from typing import Any


def _disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
    return function or (lambda decorated: decorated)


def leave_out_the_compiler() -> None:
    """Put a module in the compiler's place which has what optimizers ask of it."""
    stand_in = types.ModuleType("torch._dynamo")
    stand_in.__dict__.update(disable=_disable, graph_break=lambda: None)
    sys.modules[stand_in.__name__] = stand_in
