"""Merged gradients of TensorFlow, which travel by a measured plan, in eager code and in graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import allgather

from horovod_partial import _core
from horovod_partial.exchange.merging import FusedTraining
from horovod_partial.merging import MergedGradients, MergingPlan
from horovod_partial.policies import Quorum
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.tensorflow.buckets import Member, collect
from horovod_partial.tensorflow.graph import RoundInfo, arrive, arrive_merged, planned, runtime, step_ended
from horovod_partial.tensorflow.operations import reduce_models

# All `Merging` objects by name. Graphs only know the name.
_made: weakref.WeakValueDictionary[str, Merging] = weakref.WeakValueDictionary()
# The `Merging` objects of tapes. This dictionary keeps them alive, because programs make a new tape in each step.
_of_tapes: dict[str, Merging] = {}


def merging_of(name: str, options: MergedGradients, *arguments: Any, lives_on: bool) -> Merging:
    """Return the merged gradients of a name. They are made if there are none in this generation of Horovod.

    Args:
        name: prefix of the buckets' names.
        options: the user's argument `merging`.
        arguments: the other arguments of `Merging`.
        lives_on: whether to keep the object alive after the caller has dropped it.

    Raises:
        ValueError: the merged gradients of this name have other options.
    """
    made = _made.get(name)
    if made is None or not made.tenure.is_current:
        made = _made[name] = Merging(name, options, *arguments)
    if made.options != options:
        raise ValueError(
            "these variables' gradients are merged already, with other options; give the same merging= wherever they are "
            "reduced"
        )
    if lives_on:
        _of_tapes[name] = made
    return made


def merging_plans() -> dict[str, MergingPlan | None]:
    """Return the plans of all tapes and optimizers with `merging=hvd.MergedGradients(...)`, by the names of their buckets.

    A value is None before there is a plan. The names of tapes begin with `DistributedGradientTape`. Use this function for
    tapes, which often exist only within a `tf.function`.
    """
    return {name: one.plan for name, one in list(_made.items())}


class Merging(FusedTraining):
    """The gradients of one tape or optimizer of TensorFlow, and the measured plan by which they travel.

    When a plan is due, `_plan` runs in the graph's thread, or in eager code in the application's thread. It never runs
    twice at the same time, because steps follow each other.

    The arguments are those of `FusedTraining`. Nothing else may use `name`.
    """

    runtime = runtime

    def __init__(self, *arguments: Any) -> None:
        self.tenure = Tenure(runtime)  # the generation of Horovod that the buckets belong to
        self.tenure.enter()
        self._members: Sequence[Member] = ()  # the gradients of the last eager step, or of the last traced graph
        self._spec = _core.BucketSpec()  # the declaration of the buckets of the last eager step or traced graph
        super().__init__(*arguments)

    def collect(self) -> list[tuple[int, tf.Tensor]]:
        """Return the sums of the gradients that this rank has missed, as pairs of a position in the step and a sum.

        Only for eager code, after a flush.
        """
        self.forget_an_old_plan()
        missed: list[tuple[int, tf.Tensor]] = []
        for name, message in self.messages.items():
            gradients = collect(self.process_set, name, [self._members[i] for i in message])
            missed += zip(message, gradients, strict=False)
        return missed

    def reduce(
        self,
        tensors: Sequence[tf.Tensor],
        members: Sequence[Member],
        spec: _core.BucketSpec,
    ) -> tuple[list[tf.Tensor], list[RoundInfo]]:
        """Combine the gradients of a step over the ranks, in eager code or in a graph.

        Args:
            tensors: the tensors that travel, one for each gradient.
            members: says how to make each gradient from the tensor that has travelled.
            spec: the specification of each message's bucket. In an elastic job it changes with the number of ranks.

        Returns:
            The combined gradients, and for each gradient what became of its arrival.
        """
        self._members = members
        self._spec = spec
        if tf.executing_eagerly():
            results, infos = self._reduce_now(tensors, spec)
            results = self._restored(results)
            if step_ended(self.name):
                *results, empty = self._plan(*results, tf.stack([info.empty for info in infos]))
                infos = _with_empty(infos, empty)
            return results, infos
        results, infos, empty = arrive_merged(tensors, self.name, self.process_set, spec)
        results = self._restored(results)
        before = [*results, empty]
        with tf.control_dependencies(before):
            due = step_ended(self.name)

        # TensorFlow keeps functions of `py_function` for ever, so such a function refers weakly to this `Merging`.
        reference = weakref.ref(self)

        def run_plan(*results: tf.Tensor) -> list[tf.Tensor]:
            merging = reference()
            assert merging is not None  # the step's optimizer or tape keeps the `Merging` alive
            return merging._plan(*results)

        def plan() -> list[tf.Tensor]:
            after = tf.py_function(run_plan, before, [tensor.dtype for tensor in before])
            return [tf.ensure_shape(one, other.shape) for one, other in zip(after, before, strict=True)]

        *results, empty = tf.cond(due, plan, lambda: before)
        with tf.control_dependencies([empty]):
            planned(self.name, len(results))
        return results, _with_empty(infos, empty)

    def _reduce_now(self, tensors: Sequence[tf.Tensor], spec: _core.BucketSpec) -> tuple[list[Any], list[Any]]:
        # In eager code an operation must end before the next one begins. So operations for single gradients would wait
        # for ever: reduce whole messages.
        runtime.enter(self._steps, self.process_set.process_set_id)
        self._steps.record_all_gradients()
        self.forget_an_old_plan()
        results: list[Any] = [None] * len(tensors)
        infos: list[Any] = [None] * len(tensors)
        for name, message in self.messages.items():
            reduced, info = arrive([tensors[i] for i in message], name, self.process_set, spec)
            for i, result in zip(message, reduced, strict=True):
                results[i], infos[i] = result, info
        return results, infos

    def _restored(self, results: list[tf.Tensor]) -> list[tf.Tensor]:
        return [one.restore(result) for one, result in zip(self._members, results, strict=True)]

    def _plan(self, *results: tf.Tensor) -> list[tf.Tensor]:
        """Make a new plan between two steps. Every rank calls this.

        `results` are the combined gradients of the step, followed by a vector that says which of them are empty. The
        returned list has the same form; results that this rank had missed have been added.
        """
        self.forget_an_old_plan()
        collectives = _Collectives(self.process_set, self._spec)
        if not self.everybody_is_here(collectives):
            return list(results)
        runtime.flush(self.process_set.process_set_id)  # late contributions are delivered before buckets are replaced
        *gradients, empty = results
        is_empty = np.array(empty)
        for i, gradient in self.collect():
            gradients[i] += gradient
            is_empty[i] = 0
        self.replan(collectives)
        return [*gradients, tf.constant(is_empty)]


def _with_empty(infos: list[RoundInfo], empty: tf.Tensor) -> list[RoundInfo]:
    return [info._replace(empty=one) for info, one in zip(infos, tf.unstack(empty, len(infos)), strict=True)]


class _Collectives:
    """The collectives by which ranks plan merged gradients, in TensorFlow. Only for eager code."""

    def __init__(self, process_set: ProcessSet, spec: _core.BucketSpec) -> None:
        self._process_set = process_set
        self._spec = spec  # the specification of the training's buckets

    def everybody_is_here(self, name: str) -> bool:
        _, info = reduce_models(tf.zeros([1]), name, Quorum(1.0), self._process_set, return_info=True)
        return not info.late and int(info.fresh) == runtime.size_of(self._process_set)

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        tensor = tf.zeros([nbytes // 4])

        def reduce() -> bool:
            _, info = arrive([tensor], name, self._process_set, self._spec)
            return not info.late

        return reduce

    def from_rank_0(self, value: Any, name: str) -> Any:
        root = self._process_set.ranks[0] if self._process_set.ranks else 0
        return broadcast_object(value, root, name=name, process_set=self._process_set)

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        rows: list[list[int]] = (
            allgather(tf.constant([row], tf.int64), name=name, process_set=self._process_set).numpy().tolist()
        )
        return rows
