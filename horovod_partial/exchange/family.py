"""A family: the buckets of one optimizer's gradients, whose rounds are applied together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod.common.process_sets import ProcessSet

from horovod_partial.runtime.runtime import Runtime


class Family:
    """An optimizer's buckets in one generation, with equal names on all ranks. Implements `runtime.healing.Trained`."""

    def __init__(self, runtime: Runtime, process_set: ProcessSet, names: Iterable[str]) -> None:
        self.names = list(names)
        self._runtime = runtime
        self._process_set = process_set
        self._disturbed = 0  # the number of rounds ahead that are lost, because the program changed the model meanwhile
        self._lost_before = 0  # the number of lost rounds at the time of the last `count_anew`

    @property
    def taken(self) -> int:
        """How many rounds this rank has taken in all buckets."""
        number = self._process_set.process_set_id
        return min((self._runtime.core.taken(number, name) for name in self.names), default=0)

    @property
    def lost(self) -> int:
        """How many rounds this rank has not applied one by one since its replica was last known to be as good as any."""
        return self._lost_in_all - self._lost_before

    @property
    def _lost_in_all(self) -> int:
        return self._runtime.core.lost(self._process_set.process_set_id, self.names) + self._disturbed

    def disturb(self, rounds: int) -> None:
        """Count rounds as lost: they were applied to a copy of the model while the program changed the model itself."""
        self._disturbed += rounds

    def count_anew(self) -> None:
        self._lost_before = self._lost_in_all

    def heal(self) -> None:
        self.count_anew()
        self._runtime.healed.update(self.names)

    @property
    def has_round(self) -> bool:
        """Whether a round has ended in all buckets, so that this rank can take it now."""
        return self._runtime.core.has_round(self._process_set.process_set_id, self.names)

    @property
    def is_settled(self) -> bool:
        """Whether this rank has no late contributions and no missed results in these buckets."""
        return self._runtime.unsettled(self._process_set.process_set_id).isdisjoint(self.names)

    def clear(self) -> None:
        """Forget this rank's late contributions and missed results in these buckets."""
        self._runtime.core.clear(self._process_set.process_set_id, self.names)

    def steps_of(self, gradients: Any) -> Any:
        """Convert a number of gradients, counted over all buckets, to a number of steps per rank, on average."""
        return gradients / (len(self.names) * self._runtime.size_of(self._process_set))
