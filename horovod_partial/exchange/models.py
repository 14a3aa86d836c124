"""Averages of models: what is the same for the optimizers of every framework under a policy of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach, bucket_config
from horovod_partial._core import Periods
from horovod_partial.bucket_config import FOR_EVER
from horovod_partial.policies import GroupAverage, ModelPolicy, PartialReduce, Quorum, WeightedAverage
from horovod_partial.runtime import Runtime


def takes_late(policy: ModelPolicy | Quorum) -> bool:
    """Whether a rank takes the result of a round that it was too late for.

    Where groups average, that is the sum of others' newest models, and goes with the rank's own. An average over all ranks
    was made while the rank was out of training: it is of older models, and would undo what the rank has done since.
    """
    return isinstance(policy, GroupAverage | PartialReduce)


class ModelAverager(ABC):
    """The averages of one optimizer's model: WAGMA-SGD (IEEE TPDS 2021), P-Reduce (SIGMOD'21) and WP-SGD.

    Each framework has a subclass with `runtime`, which packs the model. A model is a sequence of the framework's tensors
    or variables, in the same order on every rank.

    Args:
        policy: what to average with whom.
        process_set: the ranks that take part.
        max_staleness: rounds; None for the setting. For `GroupAverage` only.
        grace_ms: milliseconds, or `"auto"`; None for the setting.
    """

    runtime: Runtime

    def __init__(
        self,
        policy: ModelPolicy,
        process_set: ProcessSet,
        max_staleness: int | None,
        grace_ms: float | str | None,
    ) -> None:
        bucket_config.check_rounds(max_staleness, grace_ms)  # what is wrong fails here, not in the first step
        self.name = self.signal_name = ""  # before it has been used
        self.policy = policy
        self.process_set = process_set
        by_work = isinstance(policy, WeightedAverage)
        self._options: dict[str, Any] = {"max_staleness": FOR_EVER if by_work else max_staleness, "grace_ms": grace_ms}
        self._taken = 0  # rounds whose results this rank has, or will not get any more

    def use_name(self, name: str) -> None:
        """Use buckets whose names begin with that; in each generation of Horovod before all else."""
        self.name = f"{name}.model"
        self.signal_name = f"{self.name}.period"
        self._owner = _attach.Owner()  # the buckets end when it is gone on every rank
        if isinstance(self.policy, WeightedAverage):
            self._periods = Periods(self.policy.period)
        # A flush has another bucket after the first average, if there is state then that is averaged too.
        self._flush_name, self._flush_name_with_state = f"{self.name}.flush", f"{self.name}.flush.state"
        if self.is_needed:
            names = self.name, self.signal_name, self._flush_name, self._flush_name_with_state
            self.runtime.own(self._owner, self.process_set.process_set_id, names)

    @abstractmethod
    def _signal(self) -> None:
        """Arrive at the bucket `signal_name`, and wait; in eager code."""

    @abstractmethod
    def _average_over_all(self, model: Sequence[Any], name: str, policy: WeightedAverage, work: int) -> Sequence[int]:
        """Average a model at once, in eager code, and return the work of those that took part."""

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks to average with, or may be some time."""
        return self.process_set.included() and not self.runtime.is_alone(self.process_set)

    @property
    def rounds(self) -> int:
        """Averages that have been made."""
        return self.runtime.taken(self.process_set.process_set_id, self.name)

    def averages_all(self) -> bool:
        """Whether the average that this rank comes to now is one over all ranks, for which all wait.

        One that has missed rounds does not come to one: it gets those first, and its model stands in for it.
        """
        if isinstance(self.policy, WeightedAverage):
            return True
        if not isinstance(self.policy, GroupAverage) or self.policy.period is None:
            return False
        round = self.rounds
        return round == 0 or (round == self._taken and (round + 1) % self.policy.period == 0)

    def steps_to_average(self) -> int | None:
        """Whether to average after a step that has just been taken: None, or the steps that weigh this rank's model."""
        if not isinstance(self.policy, WeightedAverage):
            return 0
        self._periods.take_step()
        while self._periods.must_signal(self._signalled()):
            self._signal()
        return self._periods.begin_next() if self._periods.is_over(self._signalled()) else None

    def flush(self, model: Sequence[Any]) -> None:
        """Average a model over all ranks, which all must come: then the models are equal, and equally new.

        Under `WeightedAverage` models weigh by the work of the present period, as in WP-SGD's last average (Algorithm 1,
        line 14), and a new period begins. Other policies average plainly.
        """
        if not self.is_needed:
            return
        process_set = self.process_set.process_set_id
        name = self._flush_name_with_state if "state" in self.policy.average and self.rounds else self._flush_name
        self.runtime.clear(process_set, [name])  # averages that were made while this rank was out of training
        self.runtime.flush(process_set)
        if isinstance(self.policy, WeightedAverage):
            work = self._periods.work()
            # Before anybody can go on: the flush has left the signal at the same round on every rank.
            self._periods.begin_anew(self._signalled())
            self.runtime.clear(process_set, [self.name])  # an average that this rank has missed
            self._average_over_all(model, name, WeightedAverage(1, self.policy.contraction), work)
        else:
            if isinstance(self.policy, GroupAverage):
                # Older models, which would stand in for ranks that are late, and sums of them; so the next round is a full one.
                self.runtime.clear(process_set, [self.name])
            iteration = self.runtime.catch_up(process_set, self.name, 0)
            iterations = self._average_over_all(model, name, WeightedAverage(1, 1.0), iteration)
            self.runtime.catch_up(process_set, self.name, max(iterations))
        self._taken = self.rounds

    def _signalled(self) -> int:
        """How many rounds of the signal have ended on this rank."""
        return self.runtime.taken(self.process_set.process_set_id, self.signal_name)
