"""Tells an object whether Horovod was initialised anew, so that the object must be made ready again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_partial.runtime.runtime import Runtime


class Tenure:
    """The generation of Horovod, from an `init` to its `shutdown`, that an object was made ready for; none at first."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._generation: int | None = None

    @property
    def is_current(self) -> bool:
        """Whether `enter` was called since Horovod's last `init`. False while Horovod is down."""
        return 0 != self._generation == self._runtime.generation

    def is_that_of(self, other: Tenure) -> bool:
        """Return whether the last `enter` of this object and that of another came after the same `init` of Horovod."""
        return self._generation == other._generation

    def enter(self) -> bool:
        """Note that the object is being made ready now. Returns True in the first call after each `init` of Horovod."""
        before, self._generation = self._generation, self._runtime.generation
        return before != self._generation
