"""`merging=hvd.MergedGradients()` of TensorFlow and Keras; `test_conformance_merging.py` has what front ends share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.keras_training import (
    SAMPLES,
    close,
    concatenated,
    flat,
    make_model,
    reference,
    sgd,
    weights,
)
from harness.matrix import alone, keras_front_end
from harness.merging import EVERYBODY, SWITCH, WARMUP
from harness.trainers import batch
from harness.world import World

import horovod_partial.tensorflow as hvd
from horovod_partial.merging import MessageCost
from horovod_partial.runtime import bucket_config
from horovod_partial.tensorflow.graph import arrive_merged, step_ended

pytestmark = [keras_front_end, pytest.mark.one_in(3)]


def merged(**options: Any) -> hvd.MergedGradients:
    return hvd.MergedGradients(**{"warmup_steps": WARMUP, "replan_every": None, **options})


def optimizer_of(sync: str, options: dict[str, Any] | None = None, **more: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(), sync=sync, merging=merged(**(options or {})), **more)


def tape_step(
    model: keras.Model,
    optimizer: Any,
    merging: hvd.MergedGradients,
    sync: str = EVERYBODY,
    graph: bool = True,
    **more: Any,
) -> Callable[..., None]:
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(model(x, training=True), tf.float32) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape, sync=sync, merging=merging, **more)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    optimizer.build(model.trainable_variables)
    return tf.function(step) if graph else step


def train(world: World, step: Callable[..., None], steps: int, first: int = 0) -> None:
    for number in range(first, first + steps):
        step(*map(tf.constant, batch(world.rank, number)))


def test_an_optimizer_that_is_gone_leaves_no_buckets(world: World, known_cost: MessageCost) -> None:
    before, plans = set(hvd.partial_stats()), len(hvd.merging_plans())
    model = make_model()
    model.compile(optimizer_of("solo", {"rule": "wait_free"}), "mse")
    x, y = concatenated([batch(world.rank, number) for number in range(SWITCH + 2)])
    model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    model.optimizer.flush()
    assert set(hvd.partial_stats()) - before
    model = None
    keras.backend.clear_session()
    gc.collect()
    world.barrier()
    hvd.allreduce(tf.zeros([1]), name=world.name("cycle"))  # by then all have negotiated once more
    assert set(hvd.partial_stats()) <= before
    assert len(hvd.merging_plans()) <= plans


@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("sync", ["full", EVERYBODY])
def test_weights_are_those_of_one_process(
    world: World, sync: str, steps_per_execution: int, known_cost: MessageCost
) -> None:
    """Before, across and after the switch, which takes place in the middle of a graph that has been traced."""
    model = make_model()
    steps = 2 * (SWITCH + 2)
    optimizer = optimizer_of(sync, {"rule": "wait_free", "replan_every": SWITCH + 1})
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    x, y = concatenated([batch(world.rank, number) for number in range(steps)])
    model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    plan = optimizer.merging_plan
    assert optimizer.rounds == steps + (2 if sync == EVERYBODY else 0)  # for each plan a flush of all
    optimizer.flush()
    assert plan.cost == known_cost
    assert plan.messages == (1,) * 4
    assert plan.predicted > plan.around > 0.0
    assert plan.measured > 0.0
    world.same((plan.gradients, plan.ready))
    world.same(flat(model))
    assert close(weights(model), weights(reference(world, sgd, steps)[0]))


def test_steps_in_a_loop_of_the_graph(world: World, known_cost: MessageCost) -> None:
    """The gradients depend on nothing, so that only resources keep those of the next step behind the new plan."""
    variables = [keras.Variable(np.zeros(3), dtype="float64") for _ in range(4)]
    options = merged(rule="wait_free", replan_every=4)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync="solo", op=hvd.Sum, merging=options)
    optimizer.build(variables)
    steps = 12

    @tf.function
    def loop() -> None:
        for number in tf.range(steps):
            value = 2.0 ** tf.cast(4 * number + world.rank % 4, tf.float64)
            optimizer.apply([value * tf.ones(3, tf.float64)] * 4, variables)

    loop()
    optimizer.flush()
    assert optimizer.merging_plan.messages == (1,) * 4
    everything = -sum(2.0 ** (4 * number + rank % 4) for number in range(steps) for rank in world.ranks)
    for variable in variables:
        assert variable.numpy().tolist() == [everything] * 3


# --- Plans ------------------------------------------------------------------------------------------------------------


@alone
def test_a_graph_whose_plan_nobody_knows(world: World) -> None:
    """As in a process that has loaded it: it has been traced elsewhere."""
    spec = bucket_config.arguments(sync=hvd.Solo(), size=world.size, average=True)

    @tf.function
    def unknown() -> Any:
        return arrive_merged([tf.ones(3), tf.ones(2)], "unknown", hvd.global_process_set, spec)[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="merged gradients unknown are not known in this process"):
        unknown()
    with pytest.raises(tf.errors.InvalidArgumentError, match="merged gradients unknown are not known in this process"):
        step_ended("unknown")


# --- Steps that fail --------------------------------------------------------------------------------------------------


def test_a_step_given_up_halfway_leaves_nothing_behind(world: World, known_cost: MessageCost) -> None:
    """On every rank a gradient never comes, while those of its message wait for it."""
    variables = [keras.Variable(np.zeros(3), dtype="float64") for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync="majority", op=hvd.Sum, merging=merged())
    optimizer.build(variables)

    @tf.function
    def step(value: tf.Tensor, fails: tf.Tensor) -> None:
        ones = tf.ones(3, tf.float64)

        def fail() -> tf.Tensor:
            tf.py_function(lambda: time.sleep(0.2), [], [])  # the others are in their message by now
            with tf.control_dependencies([tf.debugging.assert_equal(value, value + 1, "given up")]):
                return tf.identity(ones)

        last = tf.cond(fails, fail, lambda: ones)
        optimizer.apply([value * ones, value * ones, value * ones, value * last], variables)

    for number in range(2 * SWITCH):
        if number % 2 == 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="given up"):
                step(tf.constant(1e9, tf.float64), tf.constant(True))
        step(tf.constant(2.0 ** (4 * number + world.rank), tf.float64), tf.constant(False))
    optimizer.flush()
    everything = [-sum(2.0 ** (4 * number + rank) for number in range(2 * SWITCH) for rank in world.ranks)] * 3
    for variable in variables:
        assert variable.numpy().tolist() == everything


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("sync", ["full", "solo"])
def test_a_shape_that_differs_on_one_rank(world: World, sync: str, odd: int) -> None:
    width = 3 if world.rank == odd else 4
    variables = [keras.Variable(np.zeros(n), dtype="float32") for n in (2, width, 5)]
    optimizer = optimizer_of(sync)
    optimizer.build(variables)

    @tf.function
    def step() -> None:
        optimizer.apply([tf.ones(v.shape) for v in variables], variables)

    with pytest.raises(tf.errors.UnknownError, match="shape"):
        step()


# --- With the rest ----------------------------------------------------------------------------------------------------


def test_two_models_in_one_graph(world: World, known_cost: MessageCost) -> None:
    """Both plan in the same step, one after the other."""
    models = [make_model(), make_model()]
    optimizers = [sgd(), sgd()]
    steps = [
        tape_step(model, one, merged(rule=rule), graph=False)
        for model, one, rule in zip(models, optimizers, ("single", "wait_free"), strict=True)
    ]

    @tf.function
    def both(x: Any, y: Any) -> None:
        for step in steps:
            step(x, y)

    train(world, both, SWITCH + 2)
    assert [len(plan.messages) for plan in list(hvd.merging_plans().values())[-2:]] == [1, 4]
    for model in models:
        assert close(weights(model), weights(reference(world, sgd, SWITCH + 2)[0]))


def test_other_options_for_the_same_variables(world: World) -> None:
    model = make_model()
    train(world, tape_step(model, sgd(), merged(rule="single")), 1)
    with pytest.raises(ValueError, match="merged already, with other options"):
        train(world, tape_step(model, sgd(), merged(rule="exact")), 1)


class Halving:
    """A compression that changes more than the dtype."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tf.reshape(tensor, [-1])[::2], None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


def test_a_compression_that_changes_shapes_is_refused(world: World) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="compression that changes the dtype only; use Full\\(\\) without merging"):
        train(world, tape_step(model, sgd(), merged(), compression=Halving), 1)
