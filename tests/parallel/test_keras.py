"""`DistributedOptimizer` on Keras 3 with TensorFlow: what is not in `test_keras_backends`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.arguments import check_refusals
from harness.keras_training import (
    EVERYBODY,
    INPUTS,
    MAKERS,
    MODELS,
    OUTPUTS,
    SAMPLES,
    batch,
    close,
    dtype_policy,
    flat,
    make_model,
    on_time,
    reference,
    sgd,
    state,
    stepper,
    sync_of,
    weights,
)
from harness.matrix import alone, keras_front_end
from harness.world import World

import horovod_partial.tensorflow as hvd
from horovod_partial import policies
from horovod_partial.keras.optimizer import DistributedOptimizer

pytestmark = keras_front_end

modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def check_that_the_job_goes_on(world: World) -> None:
    result = hvd.partial_allreduce(tf.constant([1]), name=world.name("after"), op=hvd.Sum, sync="solo")
    assert result.numpy().tolist() == [world.size]


# --- Forms of training ------------------------------------------------------------------------------------------------


@alone
def test_every_class_is_here(world: World) -> None:
    base = keras.optimizers.Optimizer
    classes = {one for one in vars(keras.optimizers).values() if isinstance(one, type) and issubclass(one, base)}
    assert classes - {base} == {type(make()) for make in MAKERS.values()}


@on_time
def test_further_ways_to_apply(world: World, policy: str) -> None:
    """Pairs, and gradients alone of an optimizer that is built."""
    model = make_model()
    optimizer = DistributedOptimizer(sgd(), sync=policy)
    variables = model.trainable_variables
    for number in range(4):
        x, y = batch(world.rank, number)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        if number < 2:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            optimizer.apply(gradients)
    assert close(weights(model), weights(reference(world, sgd, 4)[0]))


@on_time
def test_an_optimizer_that_is_built_in_a_graph(world: World, policy: str) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(sgd(), sync=policy)
    step = tf.function(stepper(model, optimizer))
    for number in range(2):
        step(*batch(world.rank, number))
    assert close(weights(model), weights(reference(world, sgd, 2)[0]))


@on_time
def test_through_horovod_partial_tensorflow(world: World, policy: str) -> None:
    model = make_model()
    step = stepper(model, hvd.DistributedOptimizer(sgd(), sync=policy))
    for number in range(2):
        step(*batch(world.rank, number))
    assert close(weights(model), weights(reference(world, sgd, 2)[0]))


# --- Every policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "solo", "majority", EVERYBODY, *MODELS])
def test_learns_under_every_policy(world: World, policy: str) -> None:
    target = np.arange(INPUTS * OUTPUTS, dtype="float32").reshape(INPUTS, OUTPUTS) / 4 - 1
    x = np.random.default_rng(world.rank).normal(size=(320, INPUTS)).astype("float32")
    probe = np.random.default_rng(99).normal(size=(64, INPUTS)).astype("float32")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((INPUTS,)), keras.layers.Dense(OUTPUTS)])
    # Steps without any compute make ranks so late on a busy machine that no rate is small enough.
    sync: Any = policies.resolve(sync_of(policy), "full")
    if hasattr(sync, "max_staleness"):
        sync = replace(sync, max_staleness=2)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.03, momentum=0.5), sync=sync)
    model.compile(optimizer, "mse")
    loss = lambda: float(np.mean((probe @ model.get_weights()[0] + model.get_weights()[1] - probe @ target) ** 2))
    before = loss()
    model.fit(x, x @ target, batch_size=8, epochs=2, verbose=0)
    optimizer.flush()
    assert loss() < 0.2 * before


# --- Arguments of Horovod's -------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize(("policy", "as_dense"), [("full", False), ("full", True), (EVERYBODY, True), ("solo", True)])
def test_embeddings(world: World, policy: str, as_dense: bool, graph: bool) -> None:
    """Their gradients are sparse."""
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(5, 2, "zeros")])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), sync=policy, sparse_as_dense=as_dense)
    optimizer.build(model.trainable_variables)

    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(rows))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, model.trainable_variables)

    call = tf.function(step) if graph else step
    for _ in range(2):
        call(tf.constant([[world.rank % 5]]))
    optimizer.flush()
    counts = np.zeros(5)
    for rank in world.ranks:
        counts[rank % 5] += 1
    assert np.allclose(weights(model)[0][:, 0], -2 * counts / world.size)


def test_embeddings_are_refused(world: World) -> None:
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(5, 2)])
    model.compile(DistributedOptimizer(sgd(), sync="solo"), "mse")
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        model.fit(np.zeros((4, 1), "int32"), np.zeros((4, 1, 2), "float32"), verbose=0)
    check_that_the_job_goes_on(world)


# --- Saving -----------------------------------------------------------------------------------------------------------


@alone
def test_tensorflow_checkpoint(world: World, tmp_path: Path) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(MAKERS["Adam"](), sync=EVERYBODY)
    step = stepper(model, optimizer)
    step(*batch(world.rank, 0))
    saved = [one.copy() for one in state(optimizer)]
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    step(*batch(world.rank, 1))
    assert not close(state(optimizer), saved)
    tf.train.Checkpoint(model=model, optimizer=optimizer).restore(path).assert_existing_objects_matched()
    assert close(state(optimizer), saved)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "solo", "group", "ready", "weighted"])
def test_xla_is_refused(world: World, policy: str) -> None:
    model = make_model()
    model.compile(DistributedOptimizer(sgd(), sync=sync_of(policy)), "mse", jit_compile=True)
    x, y = batch(world.rank, 0)
    with pytest.raises(ValueError, match="jit_compile=False"):
        model.fit(x, y, batch_size=SAMPLES, verbose=0)
    check_that_the_job_goes_on(world)


@alone
def test_wrong_arguments(world: World) -> None:
    more: list[tuple[dict[str, Any], str]] = [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be"),
    ]
    check_refusals(hvd, lambda **options: DistributedOptimizer(sgd(), **options), more)
    for no_optimizer in (None, "sgd", tf.compat.v1.train.GradientDescentOptimizer(0.1)):
        with pytest.raises(ValueError, match="must be one of Keras 3"):
            DistributedOptimizer(no_optimizer)


@alone
@pytest.mark.parametrize("policy", MODELS)
def test_arguments_that_do_not_go_with_averages_of_models(world: World, policy: str) -> None:
    cases: list[dict[str, Any]] = [
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"op": hvd.Sum, "groups": 2},
        {"fusion": hvd.MergedGradients()},
    ]
    for options in cases:
        with pytest.raises(ValueError, match=rf"{', '.join(options)} cannot be used with \w+\(.*averages models"):
            DistributedOptimizer(sgd(), sync=sync_of(policy), **options)
    kind, arguments = {
        "group": (hvd.GroupAverage, (2,)),
        "ready": (hvd.PartialReduce, (2,)),
        "weighted": (hvd.WeightedAverage, (2, 0.9)),
    }[policy]
    with pytest.raises(ValueError, match="overlap"):
        DistributedOptimizer(sgd(), sync=kind(*arguments, overlap=True))
    if policy != "ready":
        with pytest.raises(ValueError, match="slow_momentum"):
            DistributedOptimizer(sgd(), sync=kind(*arguments, slow_momentum=hvd.SlowMomentum(0.5)))
    with pytest.raises(ValueError, match="buffers"):
        DistributedOptimizer(sgd(), sync=kind(*arguments, average=("parameters", "buffers")))


@alone
def test_wrong_arguments_of_accumulation(world: World) -> None:
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match="not both"):
        DistributedOptimizer(accumulating, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="LossScaleOptimizer takes no backward_passes_per_step"):
        DistributedOptimizer(MAKERS["LossScaleOptimizer"](), backward_passes_per_step=2)
    built = sgd()
    built.build(make_model().trainable_variables)
    with pytest.raises(ValueError, match="built already"):
        DistributedOptimizer(built, backward_passes_per_step=2)


@modes
def test_ranks_that_disagree(world: World, graph: bool) -> None:
    model = make_model()
    step = stepper(model, DistributedOptimizer(sgd(), sync="solo" if world.rank == 1 else "majority"), graph)
    with pytest.raises(tf.errors.UnknownError if graph else hvd.HorovodInternalError, match="Mismatched sync policies"):
        step(*batch(world.rank, 0))
    check_that_the_job_goes_on(world)


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_failed_step_changes_nothing(world: World, precision: str) -> None:
    with dtype_policy(precision):
        model = make_model()
        optimizer = DistributedOptimizer(sgd(), sync="solo" if world.rank == 1 else "majority")
    model.compile(optimizer, "mse")
    before = flat(model)
    x, y = batch(world.rank, 0)
    with pytest.raises(tf.errors.UnknownError, match="Mismatched sync policies"):
        model.fit(x, y, batch_size=SAMPLES, verbose=0)
    assert flat(model) == before
    check_that_the_job_goes_on(world)
