"""Which generation of Horovod something belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_partial.runtime.runtime import Runtime


class Tenure:
    """Remembers which generation of Horovod something belongs to; to none before the first `enter`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._generation: int | None = None

    @property
    def is_current(self) -> bool:
        """Whether `enter` was called in the present generation; False while Horovod is down."""
        return 0 != self._generation == self._runtime.generation

    def is_that_of(self, other: Tenure) -> bool:
        """Whether both belong to the same generation, which may have ended."""
        return self._generation == other._generation

    def enter(self) -> bool:
        """Belong to the present generation from now on. Returns whether it belonged to another one before."""
        before, self._generation = self._generation, self._runtime.generation
        return before != self._generation
