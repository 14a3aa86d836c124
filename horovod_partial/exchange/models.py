"""Averages of models over ranks: what optimizers of all frameworks share under a policy that averages models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial._core import Periods
from horovod_partial.policies import GroupAverage, ModelPolicy, PartialReduce, Quorum, WeightedAverage
from horovod_partial.runtime.runtime import Runtime


def takes_late(policy: ModelPolicy | Quorum) -> bool:
    """Return whether a rank that was too late for a round uses the result of the round.

    Under policies with groups, the rank averages the result with its own model. Under other policies, the rank ignores
    the result: a round waits for every rank that trains, so the rank was not training then. The result would undo the
    steps that the rank has taken since.
    """
    return isinstance(policy, GroupAverage | PartialReduce)


class ModelExchange(ABC):
    """Averages one optimizer's model over ranks, by WAGMA-SGD (IEEE TPDS 2021), P-Reduce (SIGMOD'21) or WP-SGD.

    Each framework has a subclass that sets `runtime` and `signal`, and packs the model. A model is a sequence of the
    framework's tensors or variables, in the same order on every rank.
    """

    runtime: Runtime
    signal: Callable[[str, ProcessSet], None]  # tells the other ranks something, by a round of a bucket; in eager code

    def __init__(self, policy: ModelPolicy, process_set: ProcessSet) -> None:
        self.name = self.signal_name = ""  # names of buckets for models and for ends of periods; "" before `use_name`
        self.policy = policy
        self.process_set = process_set

    def use_name(self, name: str) -> None:
        """Set the prefix of the buckets' names. Must be called after each `hvd.init()`, before any other method."""
        self.name = f"{name}.model"
        self.signal_name = f"{self.name}.period"
        self._owner = _attach.Owner()  # when every rank has deleted its `Owner`, the optimizer's buckets end
        if isinstance(self.policy, WeightedAverage):
            self._periods = Periods(self.policy.period)
        # A flush averages in one of two buckets: the model alone, or (after a first average) the optimizer's state too.
        self._flush_name, self._flush_name_with_state = f"{self.name}.flush", f"{self.name}.flush.state"
        if self.is_needed:
            names = self.name, self.signal_name, self._flush_name, self._flush_name_with_state
            self._named(*names).own(self._owner)

    @abstractmethod
    def _average_over_all(self, model: Sequence[Any], name: str, policy: WeightedAverage, work: int) -> Sequence[int]:
        """Average a model over all ranks of `process_set`, in place, in the bucket `name`, and wait.

        If the optimizer's policy is `WeightedAverage`, `work` is this rank's number of steps, and decides the weight of
        its model. Under all other policies `work` is the iteration of this rank's model, and all weights are equal.
        Returns the `work` of each rank. Only for eager code.
        """

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks to average with, now or (in an elastic job) perhaps later."""
        return self.process_set.included() and not self.runtime.is_alone(self.process_set)

    @property
    def rounds(self) -> int:
        """How many averages over ranks have been made since the last `hvd.init()`."""
        return self._named(self.name).taken

    def steps_to_average(self) -> int | None:
        """Count a step. Returns the number of steps that decides the model's weight; None if no average is due."""
        if not isinstance(self.policy, WeightedAverage):
            return 0
        self._periods.take_step()
        while self._periods.must_signal(self._signalled()):
            self.signal(self.signal_name, self.process_set)
        return self._periods.begin_next() if self._periods.is_over(self._signalled()) else None

    def flush(self, model: Sequence[Any]) -> None:
        """Average a model over all ranks of `process_set`, which must all call this. Afterwards their models are equal.

        Under `WeightedAverage` models are weighted by the steps of the present period, same as in WP-SGD's last average
        (Algorithm 1, line 14), and a new period begins. Other policies average with equal weights.
        """
        if not self.is_needed:
            return
        name = self._flush_name_with_state if "state" in self.policy.average and self.rounds else self._flush_name
        # Forget the results of averages that other ranks made while this rank did not train.
        self._named(name).clear()
        self.runtime.flush(self.process_set.process_set_id)
        if isinstance(self.policy, WeightedAverage):
            work = self._periods.work()
            # Begin the new period now: until a rank takes its next step, all ranks have counted the same periods.
            self._periods.begin_anew(self._signalled())
            self._named(self.name).clear()  # forget the averages that this rank has missed
            self._average_over_all(model, name, WeightedAverage(1, self.policy.contraction), work)
        else:
            if isinstance(self.policy, GroupAverage):
                # Forget this rank's model from before the flush, and the sums of models that this rank has missed.
                # Without earlier models nothing can stand in for late ranks, so the next round waits for all ranks.
                self._named(self.name).clear()
            iteration = self._named(self.name).catch_up(0)
            iterations = self._average_over_all(model, name, WeightedAverage(1, 1.0), iteration)
            self._named(self.name).catch_up(max(iterations))

    def _signalled(self) -> int:
        """Return how many ends of periods ranks have signalled, each by a round of the bucket `signal_name`."""
        return self._named(self.signal_name).taken

    def _named(self, *names: str) -> _attach.Family:
        return self.runtime.family(self.process_set, names)
