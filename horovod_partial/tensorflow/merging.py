"""Gradients that travel by a measured plan, in eager code and in graphs: `merging=hvd.MergedGradients`."""

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
from horovod_partial.merging.planner import Gradient
from horovod_partial.policies import Quorum
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.tensorflow.buckets import Member, collect
from horovod_partial.tensorflow.graph import RoundInfo, arrive, arrive_merged, planned, runtime, step_ended
from horovod_partial.tensorflow.operations import reduce_models

_made: weakref.WeakValueDictionary[str, Merging] = weakref.WeakValueDictionary()  # by name, the only thing graphs know
_of_tapes: dict[str, Merging] = {}  # keeps the mergings of tapes alive, because programs make a new tape in each step


def merging_of(name: str, options: MergedGradients, *arguments: Any, lives_on: bool) -> Merging:
    """Return the `Merging` of that name. Makes it if there is none, or only one of an earlier generation.

    Args:
        name: same as in `Merging`.
        options: the user's options.
        arguments: the other arguments of `Merging`.
        lives_on: whether it stays alive after the caller has dropped it.

    Raises:
        ValueError: there is one of this name with other options.
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

    A value is None before there is a plan. The names of tapes begin with `DistributedGradientTape`. This function shows
    the plan of a tape that only exists within a `tf.function`.
    """
    return {name: one.plan for name, one in list(_made.items())}


class Merging(FusedTraining):
    """The gradients of one tape or optimizer that travel by a plan.

    When a plan is due, `_plan` runs in the graph's thread, or in eager code in the application's thread. It never runs
    twice at the same time, because steps follow each other.

    Args:
        name: prefix of the buckets' names; the same on every rank, and not used by anything else.
        options: the user's options.
        process_set: the ranks that take part.
        gradients: name, shape and type of each gradient.
        messages: which gradients travel together before there is a plan, as positions in `gradients`.
    """

    runtime = runtime

    def __init__(
        self,
        name: str,
        options: MergedGradients,
        process_set: ProcessSet,
        gradients: Sequence[Gradient],
        messages: list[list[int]],
    ) -> None:
        self.tenure = Tenure(runtime)  # the generation, because names are counted from the start in the next one
        self.tenure.enter()
        self._members: Sequence[Member] = ()  # members of the last eager step, or of the last graph
        self._spec = _core.BucketSpec()  # declaration of the buckets of that step or graph
        super().__init__(name, options, process_set, gradients, messages)

    def collect(self) -> list[tuple[int, tf.Tensor]]:
        """Return the gradients that this rank has missed, with their positions. In eager code, after a flush."""
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
        """Return the combined gradients, restored, and what became of the arrival of each.

        Args:
            tensors: the tensors that travel.
            members: the gradients that they were made from.
            spec: the specification of each message's bucket. In an elastic job it changes with the number of ranks.
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

        # TensorFlow keeps graphs and functions of `py_function` for ever, so they must not hold a reference to this.
        reference = weakref.ref(self)

        def run_plan(*results: tf.Tensor) -> list[tf.Tensor]:
            merging = reference()
            assert merging is not None  # the optimizer or tape that makes this step keeps it alive
            return merging._plan(*results)

        def plan() -> list[tf.Tensor]:
            after = tf.py_function(run_plan, before, [tensor.dtype for tensor in before])
            return [tf.ensure_shape(one, other.shape) for one, other in zip(after, before, strict=True)]

        *results, empty = tf.cond(due, plan, lambda: before)
        with tf.control_dependencies([empty]):
            planned(self.name, len(results))
        return results, _with_empty(infos, empty)

    def _reduce_now(self, tensors: Sequence[tf.Tensor], spec: _core.BucketSpec) -> tuple[list[Any], list[Any]]:
        # In eager code operations of single gradients would wait for each other for ever, so reduce whole messages.
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
        """Make a new plan between two steps; every rank calls this. Results that this rank has missed are added.

        `results` are the gradients of the step, and then a vector that says which of them are empty. The returned list
        has the same form.
        """
        self.forget_an_old_plan()
        collectives = _Collectives(self.process_set, self._spec)
        if not self.everybody_is_here(collectives):
            return list(results)
        runtime.flush(self.process_set.process_set_id)  # deliver what is pending or missed in the old buckets
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
    """The `horovod_partial.merging.planner.Collectives` of TensorFlow, in eager code."""

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
