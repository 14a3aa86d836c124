"""`DistributedOptimizer` on Keras 3 with TensorFlow: what is not in `test_keras_backends`."""

from pathlib import Path

import keras
import pytest
import tensorflow as tf
from harness.keras_training import MAKERS, SAMPLES, as_one, close, make_model, on_time, sgd, state, stepper, sync_of
from harness.matrix import alone, keras_front_end, long_cases
from harness.trainers import EVERYBODY, batch
from harness.world import World

import horovod_partial.tensorflow as hvd
from horovod_partial.keras.optimizer import DistributedOptimizer

pytestmark = keras_front_end


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
    assert as_one(world, model, sgd, 4)


@on_time
def test_an_optimizer_that_is_built_in_a_graph(world: World, policy: str) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(sgd(), sync=policy)
    step = tf.function(stepper(model, optimizer))
    for number in range(2):
        step(*batch(world.rank, number))
    assert as_one(world, model, sgd, 2)


@alone
def test_sparse_gradients_of_several_passes(world: World) -> None:
    """Under a policy that averages models, gradients do not become dense before Keras adds them up."""
    weight = keras.Variable([[0.0], [0.0], [0.0]])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), sync=sync_of("group"), backward_passes_per_step=2)
    for row in (0, 2):
        optimizer.apply([tf.IndexedSlices(tf.ones([1, 1]), [row], [3, 1])], [weight])
    assert weight.numpy().tolist() == [[-1.0], [0.0], [-1.0]]


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


@pytest.mark.parametrize("policy", ["full", "solo", *long_cases("group", "ready", "weighted")])
def test_xla_is_refused(world: World, policy: str) -> None:
    model = make_model()
    model.compile(DistributedOptimizer(sgd(), sync=sync_of(policy)), "mse", jit_compile=True)
    x, y = batch(world.rank, 0)
    with pytest.raises(ValueError, match="jit_compile=False"):
        model.fit(x, y, batch_size=SAMPLES, verbose=0)
    check_that_the_job_goes_on(world)


@alone
@pytest.mark.parametrize("policy", ["full", "solo"])
def test_xla_is_refused_on_one_rank_too(world: World, policy: str) -> None:
    test_xla_is_refused(world, policy)


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
