"""Keras's optimizers and callbacks on one rank: what others would send is made up here."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import torch
from harness.matrix import alone
from harness.world import World

import horovod_partial.keras as hvd
from horovod_partial.keras import steps
from horovod_partial.keras.backend import backend
from horovod_partial.keras.replica import ReplicaOfVariables

pytestmark = alone

SGD = keras.optimizers.SGD


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((2,)), *layers])


def values(variables: Any) -> list[list[float]]:
    return [np.asarray(variable.numpy(), float).reshape(-1).tolist() for variable in variables]


@pytest.fixture
def _another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has gradients that are three times as large, under `hvd.Full()`."""
    reduce = lambda name, gradients, *_, **__: [(gradient + 3.0 * gradient) / 2 for gradient in gradients]
    monkeypatch.setattr(backend.framework, "reduce_fully", reduce)


def compiled(rate: Any = 0.1) -> keras.Model:
    """A model whose optimizer has a velocity for each variable."""
    model = make_model()
    model.compile(hvd.DistributedOptimizer(SGD(rate, momentum=0.9), sync="full"), "mse")
    model.optimizer.build(model.trainable_weights)
    return model


# --- Gradients


ACCUMULATIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], float]] = {
    # By what is made: an optimizer, its options, those of the wrapper, and by what the sum over the passes is multiplied.
    "sums": (SGD, {"momentum": 0.9}, {"backward_passes_per_step": 2}, 1.0),
    "averages": (SGD, {}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 0.5),
    "averages of Keras": (SGD, {"gradient_accumulation_steps": 2}, {}, 0.5),
    "clipped": (SGD, {"clipnorm": 0.5}, {"backward_passes_per_step": 2}, 1.0),
    "decayed": (keras.optimizers.AdamW, {"weight_decay": 0.5}, {"backward_passes_per_step": 2}, 1.0),
}


@pytest.mark.usefixtures("_another_rank")
@pytest.mark.parametrize("kind", ACCUMULATIONS)
def test_the_gradients_of_several_passes_are_one_update(world: World, kind: str) -> None:
    make, options, arguments, factor = ACCUMULATIONS[kind]
    weight, expected = (keras.Variable(np.full(2, 4.0, np.float32)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(make(0.1, **options), sync="full", **arguments)
    plain = make(0.1, **options | {"gradient_accumulation_steps": None})
    for first, second in ([1.0, -2.0], [3.0, 1.0]), ([0.5, 4.0], [-1.0, 2.0]):
        before = values([weight])
        optimizer.apply([torch.tensor(first)], [weight])
        assert values([weight]) == before
        optimizer.apply([torch.tensor(second)], [weight])
        plain.apply([2.0 * factor * (torch.tensor(first) + torch.tensor(second))], [expected])
        assert values([weight])[0] == pytest.approx(values([expected])[0], abs=1e-5)
    assert optimizer.rounds == int(plain.iterations) == 2


@pytest.mark.usefixtures("_another_rank")
def test_local_layers_keep_all_their_gradients(world: World) -> None:
    model = make_model()
    local, variables = model.layers[-1], model.trainable_weights
    before = values(variables)
    options = {"local_layers": local, "scale_local_gradients": False, "sync": "full"}
    optimizer = hvd.PartialDistributedOptimizer(SGD(1.0), **options)
    optimizer.apply([torch.ones(tuple(each.shape)) for each in variables], variables)
    own = {id(variable) for variable in local.trainable_weights}
    for variable, old, new in zip(variables, before, values(variables), strict=True):
        assert np.subtract(old, new) == pytest.approx(1.0 if id(variable) in own else 2.0), variable.path


# --- Schedules, which count steps


def stepping(rate: Any, **options: Any) -> Any:
    """An optimizer whose schedules count steps."""
    optimizer = SGD(rate, **options)
    steps.follow_steps(optimizer)
    optimizer.build([keras.Variable(np.zeros(2))])
    return optimizer


def take_rounds(optimizer: Any, *parts: float) -> None:
    """Count a round for each part of a step."""
    for part in parts:
        optimizer._iterations.assign_add(1)
        optimizer._horovod_steps.update_state(1, part)


def test_a_schedule_counts_the_steps_in_rounds(world: World) -> None:
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2], [0.1, 0.2, 0.3, 0.4])
    optimizer = stepping(rate)
    rates = [float(optimizer.learning_rate)]
    for part in (*[0.1] * 10, 0.5, 0.5, 1.0):
        take_rounds(optimizer, part)
        rates.append(float(optimizer.learning_rate))
    assert rates == pytest.approx([0.1] * 10 + [0.2] * 2 + [0.3, 0.4])


def test_a_schedule_goes_on_where_it_was_saved(world: World, tmp_path: Path) -> None:
    rate = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)

    saved, loaded = (compiled(rate) for _ in range(2))
    take_rounds(saved.optimizer, *[0.5] * 6)
    saved.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5")
    assert int(loaded.optimizer.iterations) == 6
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.5**3)


def test_velocities_follow_the_rates_of_all_callbacks(world: World) -> None:
    optimizer = stepping(0.1, momentum=0.9)
    optimizer.momentums[0].assign([1.0, 2.0])
    rates = steps.Rates()
    correction = lambda before, after: after / before
    for after in (0.2, 0.05):
        callback = SimpleNamespace(params=None, rate_after=lambda _, rate=after: rate, correction=correction)
        rates.add(callback)
    rates.set(optimizer)
    assert float(optimizer.learning_rate) == pytest.approx(0.05)
    assert values(optimizer.momentums) == [pytest.approx([0.5, 1.0])]


@pytest.mark.parametrize("taken", [0, 6], ids=["new", "has trained"])
def test_a_schedule_begins_with_the_epoch_that_training_resumes_with(world: World, taken: int) -> None:
    optimizer = stepping(1.0)
    optimizer._horovod, flushes = SimpleNamespace(rates=steps.Rates()), []
    optimizer.flush = lambda: flushes.append(int(optimizer._iterations))
    take_rounds(optimizer, *[0.5] * 2 * taken)
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.5**epoch)
    schedule.set_model(SimpleNamespace(optimizer=optimizer))
    schedule.set_params({"steps": 3})
    schedule.on_train_begin()
    schedule.on_epoch_begin(2)  # of `fit(initial_epoch=2)`
    schedule.on_epoch_begin(3)
    assert flushes == [2 * taken]
    assert [schedule.rate_after(taken + step) for step in (0, 2, 3)] == [0.25, 0.25, 0.125]


@pytest.mark.parametrize("epochs", [0, 0.5, 1, 1.5])
def test_a_warm_up_ends_with_the_full_rate(world: World, monkeypatch: pytest.MonkeyPatch, epochs: float) -> None:
    monkeypatch.setattr(backend.horovod, "size", lambda: 4)
    optimizer = stepping(0.4)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.4, epochs)
    warm_up.set_model(SimpleNamespace(optimizer=optimizer))
    warm_up.set_params({"steps": 4})
    warm_up.on_train_begin()
    rates = []
    for epoch in range(3):
        warm_up.on_epoch_begin(epoch)
        for batch in range(4):
            warm_up.on_train_batch_begin(batch)
            rates.append(float(optimizer.learning_rate))
    rising = int(4 * epochs)
    assert rates == pytest.approx([0.1 + 0.3 * step / rising for step in range(1, rising + 1)] + [0.4] * (12 - rising))


# --- Callbacks


def test_a_broadcast_has_everything_but_local_variables(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    local = model.layers[0].kernel
    before = values([local])

    def broadcast(variables: list[Any], root_rank: int, device: str) -> None:
        for variable in variables:
            variable.assign(np.full(tuple(variable.shape), root_rank))

    monkeypatch.setattr(backend, "broadcast_", broadcast)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(3, local_variables=local)
    callback.set_model(model)
    callback.on_train_begin()
    assert values([local]) == before
    everything = [*model.weights[1:], *model.optimizer.all_variables]
    assert {number for of_variable in values(everything) for number in of_variable} == {3.0}


def test_metrics_are_weighted_by_the_batches_of_each_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(3, {"loss": 2.0, "val_loss": 5.0}), (0, {})]
    gathered = lambda own, name: [own, *others]
    monkeypatch.setattr(backend.horovod, "allgather_object", gathered)
    optimizer = SimpleNamespace(_horovod=SimpleNamespace(shares_work=True), flush=lambda: None)
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(SimpleNamespace(optimizer=optimizer))
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        callback.on_train_batch_end(0)
        logs = {"loss": 6.0, "val_loss": 1.0}
        callback.on_epoch_end(epoch, logs)
        assert logs == {"loss": (1 * 6.0 + 3 * 2.0) / 4, "val_loss": 3.0}


def test_a_state_of_an_elastic_job_follows_its_training(world: World) -> None:
    commits: list[tuple[int, int]] = []
    state = SimpleNamespace(epoch=4, batch=0, commit=lambda: commits.append((state.epoch, state.batch)))
    kinds = hvd.elastic.UpdateEpochStateCallback, hvd.elastic.UpdateBatchStateCallback
    callbacks = [*(kind(state) for kind in kinds), hvd.elastic.CommitStateCallback(state, 2)]
    for _ in range(2):  # the second time, after a restart
        for callback in callbacks:
            callback.on_train_begin()
        for epoch in range(2):  # Keras counts from 0 again
            for batch in range(3):
                for callback in callbacks:
                    callback.on_train_batch_end(batch)
            for callback in callbacks:
                callback.on_epoch_end(epoch)
    of_a_fit = [(0, 1), (1, 0), (1, 0), (1, 2), (2, 0)]
    assert commits == [(first + epoch, batch) for first in (4, 6) for epoch, batch in of_a_fit]


# --- What ranks compare


def test_a_replica_has_the_optimizers_state(world: World) -> None:
    models = [compiled() for _ in range(2)]
    for model, change in zip(models, (1.0, 2.0), strict=True):
        momentum = model.optimizer.momentums[0]
        momentum.assign(momentum + change)
        take_rounds(model.optimizer, 0.5 * change)
    mine, theirs = (ReplicaOfVariables(model.trainable_weights, model.optimizer) for model in models)
    assert sorted(mine.write(theirs.arrays(), theirs.numbers()).values()) == [0.5, 1.0]
    one, other = (values(model.optimizer.all_variables) for model in models)
    assert one == other
