"""Remembers which generation of Horovod (the time from `init` to `shutdown`) an object belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_partial.runtime.runtime import Runtime


class Tenure:
    """The generation of Horovod that an object belongs to. Before the first `enter` it belongs to none."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._generation: int | None = None

    @property
    def is_current(self) -> bool:
        """Whether the object belongs to the present generation of Horovod. False while Horovod is down."""
        return 0 != self._generation == self._runtime.generation

    def is_that_of(self, other: Tenure) -> bool:
        """Return whether two objects belong to the same generation of Horovod, which may have ended."""
        return self._generation == other._generation

    def enter(self) -> bool:
        """Let the object belong to the present generation of Horovod. Returns whether that changed anything."""
        before, self._generation = self._generation, self._runtime.generation
        return before != self._generation
