"""`DistributedOptimizer` on Keras 3 with PyTorch as the backend: what `test_keras` asks of TensorFlow."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from harness.keras_training import (
    EVERYBODY,
    FOR_EVER,
    GRADIENTS,
    MAKERS,
    MAKERS_OF_MAKERS,
    MODELS,
    POLICIES,
    SAMPLES,
    batch,
    close,
    concatenated,
    delay,
    dtype_policy,
    everybody_averages,
    flat,
    joined,
    linear,
    make_model,
    reference,
    run_linear,
    sgd,
    state,
    stepper,
    sync_of,
    weights,
)
from harness.world import World

import horovod_partial.keras as hvd
from horovod_partial import _core
from horovod_partial.keras.backend import backend

pytestmark = pytest.mark.launch(environment={"KERAS_BACKEND": "torch"}, label="torch")

policies = pytest.mark.parametrize("policy", POLICIES)
on_time = pytest.mark.parametrize("policy", ["full", EVERYBODY])


def check_that_the_job_goes_on(world: World) -> None:
    assert hvd.allreduce(1.0, name=world.name("after"), op=hvd.Sum).item() == world.size


# --- As one process would ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "make"),
    [*((EVERYBODY, make) for make in MAKERS), *(("full", make) for make in ("SGD", "Adam", *MAKERS_OF_MAKERS))],
)
def test_trains_as_one_process_would(world: World, policy: str, make: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS[make](), sync=policy)
    assert isinstance(optimizer, type(MAKERS[make]()))
    step = stepper(model, optimizer)
    for number in range(3):
        step(*batch(world.rank, number))
        world.same(flat(model))
    expected, plain = reference(world, MAKERS[make], 3)
    assert close(weights(model), weights(expected))
    assert close(state(optimizer), state(plain))
    assert optimizer.rounds == 3


@on_time
@pytest.mark.parametrize("form", ["fit", "run_eagerly", "train_on_batch"])
def test_forms_of_training(world: World, policy: str, form: str) -> None:
    steps = 4
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS["Adam"](), sync=policy)
    model.compile(optimizer, "mse", run_eagerly=form == "run_eagerly")
    batches = [batch(world.rank, number) for number in range(steps)]
    if form == "train_on_batch":
        for x, y in batches:
            model.train_on_batch(x, y)
    else:
        model.fit(*concatenated(batches), batch_size=SAMPLES, shuffle=False, verbose=0)
    world.same(flat(model))
    assert close(weights(model), weights(reference(world, MAKERS["Adam"], steps)[0]))
    assert optimizer.rounds == steps


@pytest.mark.parametrize(
    "policy",
    [
        "solo",
        "weighted",
        *(pytest.param(one, marks=pytest.mark.full_matrix) for one in ("full", EVERYBODY, "group", "ready")),
    ],
)
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


@pytest.mark.full_matrix  # four compilers on two cores take minutes
@pytest.mark.parametrize("policy", [EVERYBODY, *MODELS])
def test_training_that_is_compiled(world: World, policy: str) -> None:
    sync, options = everybody_averages(world, ("parameters",)).get(policy, (policy, {}))
    torch.compiler.reset()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=sync, **options), "mse", jit_compile=True)
    x, y = concatenated([batch(world.rank, number) for number in range(3)])
    model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    assert close(weights(model), weights(reference(world, lambda: keras.optimizers.SGD(0.1), 3)[0]))
    assert model.optimizer.rounds == 3


@on_time
def test_several_epochs_with_validation(world: World, policy: str) -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd(), sync=policy), "mse", metrics=["mae"])
    x, y = batch(world.rank, 0)
    history = model.fit(x, y, batch_size=SAMPLES, epochs=3, validation_data=batch(0, 1), verbose=0)
    assert len(history.history["val_mae"]) == 3
    world.same(history.history["val_loss"])


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
    assert close(weights(model), weights(reference(world, sgd, 1)[0]))


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "clipnorm": lambda: {"clipnorm": 0.5},
    "global_clipnorm": lambda: {"global_clipnorm": 0.5},
    "weight_decay": lambda: {"weight_decay": 0.1},
    "ema": lambda: {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "schedule": lambda: {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)},
    "loss_scale_factor": lambda: {"loss_scale_factor": 8.0},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(world: World, option: str) -> None:
    """Clipping is of the average; gradients are large enough for that to matter."""
    scale = 30.0 if option.endswith("clipnorm") else 1.0
    make = lambda: keras.optimizers.SGD(**({"learning_rate": 0.1, "momentum": 0.5} | OPTIONS[option]()))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(), sync=EVERYBODY)
    step = stepper(model, optimizer, scale=scale)
    for number in range(3):
        step(*batch(world.rank, number))
    expected, plain = reference(world, make, 3, scale)
    assert close(weights(model), weights(expected))
    assert close(state(optimizer), state(plain))


ACCUMULATIONS: dict[str, tuple[Callable[[], Any], dict[str, Any], float]] = {
    "keras": (lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), {}, 1.0),
    "sum": (sgd, {"backward_passes_per_step": 2}, 2.0),
    "average": (sgd, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 1.0),
    "loss scale": (
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2), initial_scale=64.0
        ),
        {},
        1.0,
    ),
}


@on_time
@pytest.mark.parametrize("kind", ACCUMULATIONS)
def test_accumulated_gradients(world: World, policy: str, kind: str) -> None:
    """One exchange for two passes, but where a `LossScaleOptimizer` hides that there are two."""
    make, options, factor = ACCUMULATIONS[kind]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(), sync=policy, **options)
    step = stepper(model, optimizer)
    for number in range(6):
        before = flat(model)
        step(*batch(world.rank, number))
        assert (flat(model) == before) == (number % 2 == 0)
        world.same(flat(model))
    expected, _ = reference(world, sgd, 3, scale=factor, passes=2)
    assert close(weights(model), weights(expected))
    if kind != "loss scale":
        assert optimizer.rounds == 3


# --- Every policy -----------------------------------------------------------------------------------------------------


@policies
def test_every_policy_exchanges(world: World, policy: str) -> None:
    """Replicas agree after a flush, and are not those of ranks that train alone."""
    steps = 6
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), sync=sync_of(policy))
    model.compile(optimizer, "mse")
    x, y = concatenated([batch(world.rank, number) for number in range(steps)])
    model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0)
    rounds = optimizer.rounds
    optimizer.flush()
    everybody = world.gather(weights(model))
    assert all(close(everybody[0], other) for other in everybody)
    step = stepper(alone, keras.optimizers.SGD(0.05))
    for number in range(steps):
        step(*batch(world.rank, number))
    assert not close(weights(model), weights(alone), 1e-3)
    assert rounds >= 1
    if policy in ("full", EVERYBODY):
        assert rounds == steps
    if policy in MODELS:
        world.same(flat(model))


@pytest.mark.parametrize("policy", GRADIENTS)
def test_every_gradient_is_applied_once(world: World, policy: str) -> None:
    weight, optimizer, step = linear(policy, False)
    expected = run_linear(world, optimizer, step, 15)
    assert weight.numpy() == pytest.approx(-expected, abs=1e-4)
    optimizer.flush()  # nothing is left
    assert weight.numpy() == pytest.approx(-expected, abs=1e-4)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("passes", [1, 2])
def test_accumulated_and_compressed_gradients_are_applied_once(world: World, passes: int, compression: str) -> None:
    options = {"backward_passes_per_step": passes, "compression": getattr(hvd.Compression, compression)}
    weight, optimizer, step = linear("solo", False, **options)
    expected = run_linear(world, optimizer, step, 12)
    assert weight.numpy() == pytest.approx(-expected, abs=1e-4 if compression == "none" else 0.1)


def late_steps(world: World, missed: str) -> tuple[np.ndarray, Any]:
    """The last rank takes its second step when the others have taken five. Returns its weight, and the optimizer."""
    weight, optimizer, step = linear("solo", False, missed=missed, grace_ms=0.0)
    gradient = lambda number: torch.full([3], 10.0**number * (world.rank + 1))
    step(gradient(0))
    if world.rank == world.size - 1:
        for rank in range(world.size - 1):
            world.wait_for(f"{rank} has taken its steps")
        world.until(lambda: optimizer.rounds >= 2, "a round has ended without this rank")
        before = weight.numpy().copy()
        step(gradient(1))
        assert not np.allclose(weight.numpy(), before)  # a late rank takes what it has missed at once
    else:
        for number in range(1, 6):
            step(gradient(number) * 0 + 1.0)
        world.tell(f"{world.rank} has taken its steps")
    world.barrier()
    return weight, optimizer


def test_a_late_rank_misses_nothing(world: World) -> None:
    weight, optimizer = late_steps(world, "sum")
    assert statistics(optimizer)[0]["late"][world.size - 1] >= 1
    optimizer.flush()
    first = sum(rank + 1 for rank in world.ranks)
    expected = (first + 5 * (world.size - 1) + 10 * world.size) / world.size
    assert weight.numpy() == pytest.approx(-expected, rel=1e-5)


def test_the_latest_result_only(world: World) -> None:
    weight, optimizer = late_steps(world, "latest")
    optimizer.flush()
    everybody = world.gather(weight.numpy().tolist())
    assert everybody[world.size - 1][0] > everybody[0][0]  # it has gone less far


def statistics(optimizer: Any) -> list[dict[str, Any]]:
    return [hvd.partial_stats()[name] for name in optimizer._horovod._made._bucket_names()]


def test_rounds(world: World) -> None:
    for policy, steps, expected in (("full", 3, 3), (EVERYBODY, 3, 3), ("weighted", 4, 2)):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(), sync=sync_of(policy))
        assert optimizer.rounds == 0
        step = stepper(model, optimizer)
        for number in range(steps):
            world.barrier()
            step(*batch(world.rank, number))
        assert optimizer.rounds == expected


@policies
def test_flush_before_the_first_step(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=sync_of(policy))
    optimizer.flush()
    optimizer.build(model.trainable_variables)
    optimizer.flush()
    assert close(weights(model), weights(make_model()))


# --- Policies of models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MODELS)
def test_an_average_over_everybody_in_each_step(world: World, policy: str) -> None:
    """Models and momenta are linear in the gradients, so it is as if gradients had been averaged."""
    sync, options = everybody_averages(world, ("parameters", "state"))[policy]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=sync, **options)
    step = stepper(model, optimizer)
    for number in range(3):
        step(*batch(world.rank, number))
        world.same(flat(model))
    expected, plain = reference(world, sgd, 3)
    assert close(weights(model), weights(expected))
    assert close(state(optimizer), state(plain))
    assert optimizer.rounds == 3


@pytest.mark.parametrize("policy", MODELS)
def test_an_average_after_accumulated_gradients(world: World, policy: str) -> None:
    sync, options = everybody_averages(world, ("parameters",))[policy]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), sync=sync, backward_passes_per_step=2, average_aggregated_gradients=True, **options
    )
    step = stepper(model, optimizer)
    for number in range(4):
        step(*batch(world.rank, number))
    assert optimizer.rounds == 2
    assert close(weights(model), weights(reference(world, lambda: keras.optimizers.SGD(0.1), 2, passes=2)[0]))


def test_groups_and_full_rounds(world: World) -> None:
    schedule, period = hvd.Butterfly(2), 3
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=hvd.GroupAverage(2, period=period), grace_ms=FOR_EVER)
    step = stepper(model, optimizer)
    for number in range(6):
        step(*batch(world.rank, number))
        everybody = world.gather(flat(model))
        full = number == 0 or (number + 1) % period == 0
        for group in [list(world.ranks)] if full else schedule.groups(number, world.size):
            assert all(everybody[rank] == everybody[group[0]] for rank in group)
        if number and world.size > 2:
            assert (everybody[0] == everybody[world.size - 1]) == full
    assert optimizer.rounds == 6


@pytest.mark.parametrize("slow", [0, 1])
def test_weighted_average_of_unequal_work(world: World, slow: int) -> None:
    """A slow rank finishes its step when the fastest has taken all, and counts less."""
    period, contraction = 4, 0.7
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=hvd.WeightedAverage(period, contraction))
    step = stepper(model, optimizer)
    models = [make_model() for _ in world.ranks]
    references = [stepper(one, sgd()) for one in models]
    taken_of = [0] * world.size
    for number, slow_steps in enumerate((2, 1, 3)):
        steps_of = [slow_steps if rank == slow else period for rank in world.ranks]
        mine = range(taken_of[world.rank], taken_of[world.rank] + steps_of[world.rank])
        for one in mine[:-1]:
            step(*batch(world.rank, one))
        assert optimizer.rounds == number
        world.barrier()
        if world.rank == slow:  # in the midst of its step when the others come to the end of theirs
            period_bucket = optimizer._horovod._made._period
            ended = lambda n=number, b=period_bucket: backend.runtime.completed(0, b) >= n + 2
            world.until(ended, "the fastest has taken its steps")
        step(*batch(world.rank, mine[-1]))
        shares = _core.contraction_weights(steps_of, contraction)
        for rank in world.ranks:
            for one in range(steps_of[rank]):
                references[rank](*batch(rank, taken_of[rank] + one))
            taken_of[rank] += steps_of[rank]
        means = [
            sum(share * weight.astype(np.float64) for share, weight in zip(shares, same, strict=True))
            for same in zip(*map(weights, models), strict=True)
        ]
        for one in models:
            one.set_weights(means)
        assert close(weights(model), weights(models[0]))
        assert optimizer.rounds == number + 1
    optimizer.flush()


@pytest.mark.parametrize("policy", MODELS)
def test_half_precision_models(world: World, policy: str) -> None:
    sync, options = everybody_averages(world, ("parameters",))[policy]
    variables = [keras.Variable(np.zeros(3), dtype=dtype) for dtype in ("bfloat16", "float16", "float64")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync=sync, **options)
    for _ in range(2):
        optimizer.apply([torch.full([3], world.rank + 1.0).to(v.value.dtype) for v in variables], variables)
    mean = sum(rank + 1 for rank in world.ranks) / world.size
    for variable in variables:
        assert variable.value.detach().double().numpy() == pytest.approx(-2 * mean, rel=1e-2)


# --- Mixed precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["full", "solo", EVERYBODY, *MODELS])
def test_mixed_precision(world: World, policy: str) -> None:
    with dtype_policy("mixed_float16"):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), sync=sync_of(policy))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model.compile(optimizer, "mse")
        assert model.optimizer is optimizer
        x, y = concatenated([batch(world.rank, number) for number in range(4)])
        model.fit(x, 0.1 * y, batch_size=SAMPLES, shuffle=False, verbose=0)
        optimizer.flush()
        assert int(optimizer.iterations) >= 1
        assert not close(weights(model), weights(make_model()), 1e-4)
    everybody = world.gather(weights(model))
    assert all(close(everybody[0], other) for other in everybody)
    if policy in ("full", EVERYBODY):
        expected = make_model()
        step = stepper(expected, keras.optimizers.SGD(0.05))
        for number in range(4):
            xs, ys = joined(world, number)
            step(xs, 0.1 * ys)
        assert close(weights(model), weights(expected), 1e-2)


@on_time
def test_gradients_of_one_rank_that_are_not_finite(world: World, policy: str) -> None:
    """All ranks skip that step, and halve their scale."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0), sync=policy)
    step = stepper(model, optimizer)
    step(*batch(world.rank, 0))
    before = flat(model)
    x, y = batch(world.rank, 1)
    step(x, y + (np.inf if world.rank == 1 else 0.0))
    assert flat(model) == before
    assert float(optimizer.dynamic_scale) == 32.0
    step(*batch(world.rank, 2))
    world.same(flat(model))
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("policy", ["solo", "majority"])
def test_gradients_that_are_not_finite_with_late_ranks(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0), sync=policy)
    step = stepper(model, optimizer)
    rng = random.Random(world.random().random() + world.rank)
    for number in range(10):
        delay(rng)
        x, y = batch(world.rank, number)
        step(x, y + (np.inf if world.rank == number else 0.0))
    optimizer.flush()
    assert np.isfinite(flat(model)).all()


def test_a_flush_without_any_result_changes_nothing(world: World) -> None:
    """All that was missed has been dropped, as not finite: momentum alone must not move the weights."""
    weight = keras.Variable(np.zeros(3, np.float32))
    make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), initial_scale=1.0)
    optimizer = hvd.DistributedOptimizer(make(), sync="solo", grace_ms=0.0)
    optimizer.apply([torch.ones(3)], [weight])
    world.barrier()
    if world.rank == 0:
        optimizer.apply([torch.full([3], np.inf)], [weight])
    world.until(lambda: optimizer.rounds >= 2, "a round of rank 0 alone has ended")
    world.barrier()
    optimizer.flush()
    assert weight.numpy().tolist() == [-1.0] * 3


def test_mixed_precision_that_is_known_too_late(world: World) -> None:
    with dtype_policy("mixed_float16"):
        model = make_model()
    with pytest.raises(ValueError, match="wrap the outermost optimizer"):
        model.compile(hvd.DistributedOptimizer(sgd(), sync=EVERYBODY), "mse")


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "bfloat16", "float64"])
@on_time
def test_other_precisions(world: World, precision: str, policy: str) -> None:
    with dtype_policy(precision):
        model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), sync=policy), "mse")
    x, y = batch(world.rank, 0)
    model.fit(x, y, batch_size=SAMPLES, epochs=2, verbose=0)
    world.same([weight.astype("float64").tolist() for weight in weights(model)])


# --- Arguments of Horovod's -------------------------------------------------------------------------------------------


@on_time
@pytest.mark.parametrize("scaled", [True, False])
def test_local_variables(world: World, policy: str, scaled: bool) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=policy, scale_local_gradients=scaled)
    local, shared = model.trainable_variables[0], model.trainable_variables[1]
    optimizer.register_local_var(local)
    step = stepper(model, optimizer)
    step(*batch(world.rank, 0))
    alone = make_model()
    stepper(alone, keras.optimizers.SGD(0.1 / world.size if scaled else 0.1))(*batch(world.rank, 0))
    assert close([local.numpy()], weights(alone)[:1])
    expected, _ = reference(world, lambda: keras.optimizers.SGD(0.1), 1)
    assert close(weights(model)[1:], weights(expected)[1:])
    optimizer.register_local_var(shared)  # from now on
    step(*batch(world.rank, 1))
    everybody = world.gather(weights(model))
    assert not close(everybody[0][1:2], everybody[1][1:2])


@on_time
@pytest.mark.parametrize("groups", ["number", "lists", "some"])
def test_groups(world: World, policy: str, groups: str) -> None:
    model = make_model()
    variables = model.trainable_variables
    chosen: Any = {
        "number": 2,
        "lists": [[variables[0], variables[3]], [variables[1], variables[2]]],
        "some": [[variables[0], variables[3]]],
    }[groups]
    before = set(hvd.partial_stats())
    step = stepper(model, hvd.DistributedOptimizer(sgd(), sync=policy, groups=chosen))
    for number in range(3):
        step(*batch(world.rank, number))
    assert close(weights(model), weights(reference(world, sgd, 3)[0]))
    assert len(set(hvd.partial_stats()) - before) == (0 if policy == "full" else 2)


@on_time
def test_compression(world: World, policy: str) -> None:
    model = make_model()
    step = stepper(model, hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16, sync=policy))
    for number in range(3):
        step(*batch(world.rank, number))
    world.same(flat(model))
    assert close(weights(model), weights(reference(world, sgd, 3)[0]), 1e-2)


@on_time
def test_predivide_factor_and_sum(world: World, policy: str) -> None:
    total = sum(rank + 1 for rank in world.ranks)
    for options, factor in (({"gradient_predivide_factor": 4.0}, 1 / world.size), ({"op": hvd.Sum}, 1.0)):
        weight, _, step = linear(policy, False, **options)
        step(torch.full([3], world.rank + 1.0))
        assert weight.numpy() == pytest.approx(-factor * total)


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


@on_time
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_without_a_gradient(world: World, policy: str) -> None:
    used, unused = keras.Variable(np.zeros(2)), keras.Variable(np.ones(2))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), sync=policy)
    optimizer.build([unused, used])
    optimizer.apply([None, torch.full([2], world.rank + 1.0)], [unused, used])
    assert used.numpy().tolist() == [-sum(rank + 1 for rank in world.ranks) / world.size] * 2
    assert unused.numpy().tolist() == [1.0] * 2


@on_time
def test_two_optimizers(world: World, policy: str) -> None:
    """As in a GAN: each has buckets of its own, although the models are alike."""
    models = [make_model() for _ in range(2)]
    steps = [stepper(model, hvd.DistributedOptimizer(sgd(), sync=policy)) for model in models]
    for number in range(2):
        steps[0](*batch(world.rank, number))
        steps[1](*batch(world.rank, number + 10))
    assert close(weights(models[0]), weights(reference(world, sgd, 2)[0]))
    expected = make_model()
    plain = stepper(expected, sgd())
    for number in range(2):
        plain(*joined(world, number + 10))
    assert close(weights(models[1]), weights(expected))


# --- Saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "make"),
    [("full", "Adam"), (EVERYBODY, "LossScaleOptimizer"), (EVERYBODY, "MultiOptimizer"), ("ready", "Adam")],
)
def test_saved_models_hold_the_plain_optimizer(world: World, policy: str, make: str, tmp_path: Path) -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(MAKERS[make](), sync=sync_of(policy)), "mse")
    x, y = batch(world.rank, 0)
    model.fit(x, y, batch_size=SAMPLES, epochs=2, verbose=0)
    model.optimizer.flush()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(MAKERS[make]())
    assert flat(loaded) == flat(model)
    assert [one.tolist() for one in state(loaded.optimizer)] == [one.tolist() for one in state(model.optimizer)]
    if policy != "ready":  # wrapped again it goes on as the other does
        step = stepper(model, model.optimizer)
        again = stepper(loaded, hvd.DistributedOptimizer(loaded.optimizer, sync=policy))
        step(*batch(world.rank, 1))
        again(*batch(world.rank, 1))
        assert close(weights(loaded), weights(model))


@pytest.mark.parametrize("make", MAKERS)
def test_configuration(world: World, make: str) -> None:
    plain = MAKERS[make]()
    expected = plain.get_config()
    optimizer = hvd.DistributedOptimizer(plain, sync="majority", groups=2)
    assert optimizer.get_config() == expected
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.is_horovod_partial
    assert again._horovod_arguments == optimizer._horovod_arguments
    loaded, reloaded = [
        keras.optimizers.deserialize(keras.optimizers.serialize(o)) for o in (optimizer, MAKERS[make]())
    ]
    assert type(loaded) is type(reloaded)


# --- Values -----------------------------------------------------------------------------------------------------------


def test_values(world: World) -> None:
    mean = sum(world.ranks) / world.size
    assert hvd.allreduce(float(world.rank), name=world.name("mean")).item() == mean
    assert hvd.allgather([world.rank], name=world.name("all")).tolist() == list(world.ranks)
    assert hvd.broadcast(np.float64(world.rank), 1, name=world.name("one")).item() == 1.0
    part = hvd.reducescatter(np.full(world.size, world.rank, "float32"), name=world.name("part"))
    assert part.tolist() == [mean]
    variables = [
        keras.Variable(np.full(2, float(world.rank))),
        keras.Variable(world.rank, dtype="int64", trainable=False),
    ]
    hvd.broadcast_variables(variables, 1)
    assert [variable.numpy().tolist() for variable in variables] == [[1, 1], 1]


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["full", EVERYBODY, "group"])
def test_wrapping_twice(world: World, first: str) -> None:
    optimizer = hvd.DistributedOptimizer(sgd(), sync=sync_of(first))
    for second in ("full", "solo", hvd.GroupAverage(2)):
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(optimizer, sync=second)


def test_wrong_arguments(world: World) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync": "most"}, "unknown sync policy"),
        ({"missed": "replay"}, "missed must be"),
        ({"divisor": "none"}, "divisor must be"),
        ({"max_staleness": -1}, "max_staleness must be"),
        ({"grace_ms": -1}, "grace_ms must be"),
        ({"op": hvd.Adasum}, "hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups should be"),
        ({"device_dense": "/cpu:0"}, "device_dense cannot be used"),
        ({"device_sparse": "/cpu:0"}, "device_sparse cannot be used"),
        ({"sync": hvd.GroupAverage(2, overlap=True)}, "overlap"),
        ({"sync": hvd.GroupAverage(2, average=("parameters", "buffers"))}, "buffers"),
        ({"sync": hvd.GroupAverage(2), "groups": 2}, "groups cannot be used"),
        ({"fusion": hvd.MergedGradients()}, "fusion cannot be used with Keras on PyTorch"),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(), **({"sync": "solo"} | options))
    for callback in (
        hvd.callbacks.MetricAverageCallback,
        lambda **d: hvd.callbacks.BroadcastGlobalVariablesCallback(0, **d),
    ):
        with pytest.raises(ValueError, match="device cannot be used"):
            callback(device="/cpu:0")
    model = make_model()
    with pytest.raises(ValueError, match="must be one of Keras 3"):
        hvd.DistributedOptimizer(torch.optim.SGD([v.value for v in model.trainable_variables], lr=0.1))


@on_time
def test_no_gradient_at_all(world: World, policy: str) -> None:
    weight = keras.Variable(np.ones(2))
    with pytest.raises(ValueError, match="No gradients provided"):
        hvd.DistributedOptimizer(sgd(), sync=policy).apply([None], [weight])


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_failed_step_changes_nothing(world: World, precision: str) -> None:
    with dtype_policy(precision):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(), sync="solo" if world.rank == 1 else "majority")
    model.compile(optimizer, "mse")
    before = flat(model)
    x, y = batch(world.rank, 0)
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched sync policies"):
        model.fit(x, y, batch_size=SAMPLES, verbose=0)
    assert flat(model) == before
    check_that_the_job_goes_on(world)
