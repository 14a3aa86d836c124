"""Gradients whose messages a measured plan makes, in eager code and in graphs: `fusion=hvd.MergedGradients`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.functions import broadcast_object
from horovod.tensorflow.mpi_ops import allgather

from horovod_partial import _core, bucket_config
from horovod_partial.fusion import FusionPlan, MergedGradients
from horovod_partial.fusion.planner import Clock, Gradient, Planner
from horovod_partial.policies import Quorum
from horovod_partial.tensorflow.buckets import Member, collect
from horovod_partial.tensorflow.fusion_steps import MergedSteps
from horovod_partial.tensorflow.graph import RoundInfo, arrive, arrive_merged, planned, runtime, step_ended

_made: dict[str, Merging] = {}  # by name: a tape is made anew in each step, and a graph knows but the name


def merging(name: str, options: MergedGradients, *arguments: Any) -> Merging:
    """The `Merging` of that name, made where there is none, or one of an earlier generation.

    Raises:
        ValueError: there is one with other options.
    """
    if name not in _made or _made[name].generation != runtime.generation:
        _made[name] = Merging(name, options, *arguments)
    if _made[name].options != options:
        raise ValueError(
            "these variables' gradients are merged already, with other options; give the same fusion= wherever they are "
            "reduced"
        )
    return _made[name]


def fusion_plans() -> dict[str, FusionPlan | None]:
    """The plans of all tapes and optimizers with `fusion=hvd.MergedGradients(...)`, by the names of their buckets.

    None before there is a plan. A tape in a `tf.function` cannot be asked from outside; its name begins with
    `DistributedGradientTape`.
    """
    return {name: one.plan for name, one in _made.items()}


class Merging:
    """The gradients of one tape or optimizer that travel by a plan.

    Their steps are counted, and measured, in the library of TensorFlow's operations (`MergedSteps`): a graph that has been
    traced runs without Python until it is time to plan. Then `_plan` runs in the graph's thread, or in the
    application's in eager code; never twice at the same time, since steps follow each other.

    Args:
        name: of the buckets; the same on every rank, and of nothing else.
        options: the user's.
        process_set: the ranks that take part.
        gradients: what a plan has to know of each.
        messages: which travel together before there is a plan, as positions.
    """

    def __init__(
        self,
        name: str,
        options: MergedGradients,
        process_set: ProcessSet,
        gradients: Sequence[Gradient],
        messages: list[list[int]],
    ) -> None:
        self.options = options
        self.generation = runtime.generation  # of Horovod; in a new one names are counted anew
        self._name = name
        self._process_set = process_set
        self._names = [gradient.name for gradient in gradients]
        self._members: Sequence[Member] = ()  # of the last step in eager code, or the last graph
        self._default = messages
        self._collectives = _Collectives(process_set)
        self._planner = Planner(options, gradients, name, self._collectives)
        self._use(name, messages)
        self._rounds_before = 0  # in buckets that a plan has replaced
        self._plans = 0  # since Horovod was initialised
        elements = [math.prod(gradient.shape) for gradient in gradients]
        self._steps = MergedSteps(name, elements, messages, self._planner.first_due, options.warmup_steps)

    def _use(self, prefix: str, messages: list[list[int]]) -> None:
        self._messages = {f"{prefix}.{index}": message for index, message in enumerate(messages)}  # by bucket

    @property
    def plan(self) -> FusionPlan | None:
        """The plan in use; None before there is one."""
        plan = self._planner.plan if self._steps.plans > 0 else None
        if plan is not None and plan.measured is None:
            clock = self._measured(first=True)
            if clock.steps == self.options.warmup_steps:
                self._planner.measured(clock)
                plan = self._planner.plan
        return plan

    @property
    def rounds(self) -> int:
        """Rounds that all buckets have ended on this rank."""
        self._forget_an_old_plan()
        process_set = self._process_set.process_set_id
        return self._rounds_before + min(runtime.completed(process_set, name) for name in self._messages)

    def collect(self) -> list[tuple[int, tf.Tensor]]:
        """What this rank has missed: gradients with their positions. In eager code, after a flush."""
        self._forget_an_old_plan()
        missed: list[tuple[int, tf.Tensor]] = []
        for name, message in self._messages.items():
            gradients = collect(self._process_set, name, [self._members[i] for i in message])
            missed += zip(message, gradients, strict=False)
        return missed

    def reduce(
        self,
        tensors: Sequence[tf.Tensor],
        members: Sequence[Member],
        spec: _core.BucketSpec,
    ) -> tuple[list[tf.Tensor], list[RoundInfo]]:
        """The combined gradients, restored; and what became of the round of each.

        Args:
            tensors: what travels.
            members: of which gradients.
            spec: of each message's bucket; that of an elastic job changes with its ranks.
        """
        self._members = members
        self._collectives.spec = spec
        if tf.executing_eagerly():
            results, infos = self._reduce_now(tensors, spec)
            results = self._restored(results)
            if step_ended(self._name):
                *results, empty = self._plan(*results, tf.stack([info.empty for info in infos]))
                infos = _with_empty(infos, empty)
            return results, infos
        results, infos, empty = arrive_merged(tensors, self._name, self._process_set, spec)
        results = self._restored(results)
        before = [*results, empty]
        with tf.control_dependencies(before):
            due = step_ended(self._name)

        def plan() -> list[tf.Tensor]:
            after = tf.py_function(self._plan, before, [tensor.dtype for tensor in before])
            return [tf.ensure_shape(one, other.shape) for one, other in zip(after, before, strict=True)]

        *results, empty = tf.cond(due, plan, lambda: before)
        with tf.control_dependencies([empty]):
            planned(self._name, len(results))
        return results, _with_empty(infos, empty)

    def _reduce_now(self, tensors: Sequence[tf.Tensor], spec: _core.BucketSpec) -> tuple[list[Any], list[Any]]:
        # Operations of single gradients would wait for each other for ever in eager code.
        self._steps.begin(self._process_set.process_set_id)
        self._forget_an_old_plan()
        results: list[Any] = [None] * len(tensors)
        infos: list[Any] = [None] * len(tensors)
        for name, message in self._messages.items():
            reduced, info = arrive([tensors[i] for i in message], name, self._process_set, spec)
            for i, result in zip(message, reduced, strict=True):
                results[i], infos[i] = result, info
        return results, infos

    def _restored(self, results: list[tf.Tensor]) -> list[tf.Tensor]:
        return [one.restore(result) for one, result in zip(self._members, results, strict=True)]

    def _forget_an_old_plan(self) -> None:
        """Where Horovod has been initialised anew since it was made: ranks that are new in an elastic job know none."""
        if self._steps.plans < self._plans:
            self._planner.restart()
            self._plans = self._rounds_before = 0
            self._use(self._name, self._default)

    def _plan(self, *results: tf.Tensor) -> list[tf.Tensor]:
        """Between two steps, on all ranks: a new plan. The results get what this rank has missed.

        Behind the results comes whether each is none.
        """
        self._forget_an_old_plan()
        if not self._planner.everybody_is_here():
            return list(results)
        runtime.flush(self._process_set.process_set_id)  # what is pending or missed in the old buckets belongs to them
        *gradients, empty = results
        is_empty = np.array(empty)
        for i, gradient in self.collect():
            gradients[i] += gradient
            is_empty[i] = 0
        current = [[self._names[i] for i in message] for message in self._messages.values()]
        names = self._planner.make_plan(current, self._measured(first=False))
        messages = None
        if names is not None:
            positions = {name: position for position, name in enumerate(self._names)}
            messages = [[positions[name] for name in message] for message in names]
            self._rounds_before = self.rounds  # the same on all ranks after a flush
            self._use(f"{self._name}.plan{self._plans + 1}", messages)
        self._steps.plan(messages, self.options.replan_every)
        self._plans += 1
        return [*gradients, tf.constant(is_empty)]

    def _measured(self, *, first: bool) -> Clock:
        """The first steps under the plan in use, or the last."""
        clock = Clock()
        for *moments, end in self._steps.times(first=first).tolist():
            for name, moment in zip(self._names, moments, strict=True):
                if not math.isnan(moment):
                    clock.gradient(name, moment)
            clock.synchronized(end)
            clock.step_ended(end)
        return clock


def _with_empty(infos: list[RoundInfo], empty: tf.Tensor) -> list[RoundInfo]:
    return [info._replace(empty=one) for info, one in zip(infos, tf.unstack(empty, len(infos)), strict=True)]


class _Collectives:
    """TensorFlow's `horovod_partial.fusion.planner.Collectives`, in eager code."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self.spec = _core.BucketSpec()  # of the training's buckets, once there are any

    def everybody_is_here(self, name: str) -> bool:
        size = self._process_set.size()
        spec = bucket_config.arguments(sync=Quorum(1.0), size=size, average=True, missed="latest", late="discard")
        _, info = arrive([tf.zeros([1])], name, self._process_set, spec)
        return not info.late and int(info.fresh) == size

    def probe(self, name: str, nbytes: int) -> Callable[[], bool]:
        tensor = tf.zeros([nbytes // 4])

        def reduce() -> bool:
            _, info = arrive([tensor], name, self._process_set, self.spec)
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
