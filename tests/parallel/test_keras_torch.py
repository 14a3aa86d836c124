"""`DistributedOptimizer` on Keras 3 with PyTorch: `test_keras_backends`, and what is only here."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import torch
from harness.keras_training import (
    MODELS,
    SAMPLES,
    as_one,
    concatenated,
    ended,
    linear,
    make_model,
    on_time,
    run_linear,
    sgd,
    sync_of,
)
from harness.matrix import alone, keras_on_torch, long_cases
from harness.models import everybody_averages
from harness.trainers import EVERYBODY, batch
from harness.world import World
from test_keras_backends import *
from test_keras_backends import test_other_precisions

import horovod_partial.keras as hvd

pytestmark = keras_on_torch

GRAPHS = {"eager": False}
FORMS = ["fit", "eager fit", "train_on_batch"]


def check_that_the_job_goes_on(world: World) -> None:
    assert hvd.allreduce(1.0, name=world.name("after"), op=hvd.Sum).item() == world.size


# --- Forms of training ------------------------------------------------------------------------------------------------


@pytest.mark.launch(ranks=(2,))
@pytest.mark.parametrize("policy", ["solo", "weighted", *long_cases("full", EVERYBODY, "group", "ready")])
def test_steps_that_are_compiled(world: World, policy: str) -> None:
    """Traced, but not handed to a compiler of machine code. The second optimizer finds what the first has left behind."""
    for _ in range(2):
        torch.compiler.reset()  # or a second one of the kind may not be compiled at all
        weight, optimizer, step = linear(sync_of(policy), False)
        expected = run_linear(world, optimizer, torch.compile(step, backend="eager"), 6)
        if policy in MODELS:
            world.same(weight.numpy().tolist())
        else:
            assert weight.numpy() == pytest.approx(-expected, abs=1e-4)


@pytest.mark.full_matrix
@pytest.mark.launch(ranks=(2,))
@pytest.mark.parametrize("policy", [EVERYBODY, *MODELS])
def test_training_that_is_compiled(world: World, policy: str) -> None:
    sync = everybody_averages(world, ("parameters",)).get(policy, policy)
    torch.compiler.reset()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=sync), "mse", jit_compile=True)
    x, y = concatenated([batch(world.rank, number) for number in range(3)])
    model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    assert as_one(world, model, lambda: keras.optimizers.SGD(0.1), 3)
    assert model.optimizer.rounds == 3


@on_time
def test_gradients_are_left_as_they_are(world: World, policy: str) -> None:
    """Those that are handed over, and `grad` of the parameters."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=policy)
    x, y = batch(world.rank, 0)
    loss = keras.ops.mean((model(x) - keras.ops.convert_to_tensor(y)) ** 2)
    variables = model.trainable_variables
    gradients = list(torch.autograd.grad(loss, [variable.value for variable in variables]))
    before = [gradient.clone() for gradient in gradients]
    optimizer.apply(gradients, variables)
    assert all(torch.equal(one, other) for one, other in zip(gradients, before, strict=True))
    assert all(variable.value.grad is None for variable in variables)
    assert as_one(world, model, sgd, 1)


# --- Every policy -----------------------------------------------------------------------------------------------------


def test_full_in_bfloat16(world: World) -> None:
    test_other_precisions(world, "full", "bfloat16")


def test_a_flush_without_any_result_changes_nothing(world: World) -> None:
    """All that was missed has been dropped, as not finite: momentum alone must not move the weights."""
    weight = keras.Variable(np.zeros(3, np.float32))
    make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), initial_scale=1.0)
    optimizer = hvd.DistributedOptimizer(make(), sync="solo:grace_ms=0")
    optimizer.apply([torch.ones(3)], [weight])
    world.barrier()
    if world.rank == 0:
        optimizer.apply([torch.full([3], np.inf)], [weight])
    world.until(lambda: ended(optimizer) >= 2, "a round of rank 0 alone has ended")
    world.barrier()
    optimizer.flush()
    assert weight.numpy().tolist() == [-1.0] * 3


# --- Arguments of Horovod's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", EVERYBODY, "solo"])
def test_sparse_gradients(world: World, policy: str) -> None:
    """Those of Keras's own layers are dense; others are made so where that is asked for."""
    weight, _, step = linear(policy, False)
    sparse = torch.tensor([0.0, world.rank + 1.0, 0.0]).to_sparse()
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        step(sparse)
    check_that_the_job_goes_on(world)
    weight, optimizer, step = linear(policy, False, sparse_as_dense=True)
    step(sparse)
    optimizer.flush()
    assert weight.numpy() == pytest.approx([0.0, -sum(rank + 1 for rank in world.ranks) / world.size, 0.0])


# --- Values -----------------------------------------------------------------------------------------------------------


def test_values(world: World) -> None:
    mean = sum(world.ranks) / world.size
    assert hvd.allreduce(float(world.rank), name=world.name("mean")).item() == mean
    assert hvd.allgather([world.rank], name=world.name("all")).tolist() == list(world.ranks)
    assert hvd.broadcast(np.float64(world.rank), 1, name=world.name("one")).item() == 1.0
    part = hvd.reducescatter(np.full(world.size, world.rank, "float32"), name=world.name("part"))
    assert part.tolist() == [mean]
    counter = keras.Variable(world.rank, dtype="int64", trainable=False)
    variables = [keras.Variable(np.full(2, float(world.rank))), counter]
    hvd.broadcast_variables(variables, 1)
    assert [variable.numpy().tolist() for variable in variables] == [[1, 1], 1]
    for dtype in ("bfloat16", "float16", "uint8", "bool"):
        variable = keras.Variable([float(world.rank % 2)], dtype=dtype, trainable=False)
        hvd.broadcast_variables([variable], 1)
        assert float(keras.ops.cast(variable, "float32")[0]) == 1
    with pytest.raises(ValueError, match="number 2 is missing on rank 0, and float32 \\(\\) on rank\\(s\\) 1"):
        hvd.broadcast_variables(variables + [keras.Variable(0.0)] * world.rank, 0)


# --- Errors -----------------------------------------------------------------------------------------------------------


@alone
def test_callbacks_without_a_device(world: World) -> None:
    broadcast = functools.partial(hvd.callbacks.BroadcastGlobalVariablesCallback, 0)
    for callback in (hvd.callbacks.MetricAverageCallback, broadcast):
        with pytest.raises(ValueError, match="device cannot be used"):
            callback(device="/cpu:0")
