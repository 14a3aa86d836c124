"""`DistributedOptimizer` on each of Keras's backends: here on TensorFlow, and `test_keras_torch` takes these tests too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.arguments import NONSENSE, check_nonsense
from harness.keras_training import (
    MAKERS,
    MODELS,
    SAMPLES,
    Slow,
    as_one,
    close,
    concatenated,
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
from harness.matrix import alone, keras_front_end, mainly_on_torch
from harness.trainers import EVERYBODY, batch, joined
from harness.world import World

import horovod_partial.keras as hvd

# Graphs take longer to trace than to run; on PyTorch, which is quick, all cases are run.
pytestmark = [keras_front_end, pytest.mark.one_in(6)]

# A module that takes these tests has its own.
GRAPHS = {"eager": False, "graph": True}
FORMS = ["fit", "eager fit", "steps per execution", "train_on_batch"]

LONG = pytest.mark.full_matrix


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "graph" in metafunc.fixturenames:
        metafunc.parametrize("graph", metafunc.module.GRAPHS.values(), ids=metafunc.module.GRAPHS)
    if "form" in metafunc.fixturenames:
        metafunc.parametrize("form", metafunc.module.FORMS)


def in_graph(policy: str) -> bool:
    """Graphs take longer to make than to run: `Full`, whose code is the shorter, in eager code, and the other in a graph."""
    return policy == EVERYBODY and keras.backend.backend() == "tensorflow"


# --- As one process would ---------------------------------------------------------------------------------------------


@on_time
def test_forms_of_training(world: World, policy: str, form: str) -> None:
    """Loops of one's own are in `test_conformance_optimizer`."""
    steps = 4
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS["Adam"](), sync=policy)
    options = {"eager fit": {"run_eagerly": True}, "steps per execution": {"steps_per_execution": 2}}
    model.compile(optimizer, "mse", **options.get(form, {}))
    assert model.optimizer is optimizer
    batches = [batch(world.rank, number) for number in range(steps)]
    if form == "train_on_batch":
        for x, y in batches:
            model.train_on_batch(x, y)
    else:
        model.fit(*concatenated(batches), batch_size=SAMPLES, shuffle=False, verbose=0)
    world.same(flat(model))
    assert as_one(world, model, MAKERS["Adam"], steps)
    assert optimizer.rounds == steps


@on_time
def test_an_optimizer_that_has_trained(world: World, policy: str) -> None:
    """Its state goes on: all ranks have trained alike before."""
    model, optimizer = make_model(), MAKERS["Adam"]()
    plain_step = stepper(model, optimizer)
    for number in range(2):
        plain_step(*joined(world, number))
    step = stepper(model, hvd.DistributedOptimizer(optimizer, sync=policy))
    for number in range(2, 4):
        step(*batch(world.rank, number))
    assert as_one(world, model, MAKERS["Adam"], 4)
    assert int(optimizer.iterations) == 4


@on_time
def test_several_epochs_with_validation(world: World, policy: str) -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd(), sync=policy), "mse", metrics=["mae"])
    x, y = batch(world.rank, 0)
    history = model.fit(x, y, batch_size=SAMPLES, epochs=3, validation_data=batch(0, 1), verbose=0)
    assert len(history.history["val_mae"]) == 3
    world.same(history.history["val_loss"])


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "clipnorm": lambda: {"clipnorm": 0.5},
    "clipvalue": lambda: {"clipvalue": 0.1},
    "weight_decay": lambda: {"weight_decay": 0.1},
    "ema": lambda: {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "loss_scale_factor": lambda: {"loss_scale_factor": 8.0},
}


WITH_FULL = [("full", "clipnorm"), ("full", "ema")]


@pytest.mark.parametrize(("policy", "option"), [*((EVERYBODY, option) for option in OPTIONS), *WITH_FULL])
def test_options(world: World, policy: str, option: str) -> None:
    """Clipping is of the average; gradients are large enough for that to matter."""
    scale = 30.0 if option.startswith("clip") else 1.0
    make = lambda: keras.optimizers.SGD(**({"learning_rate": 0.1, "momentum": 0.5} | OPTIONS[option]()))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(), sync=policy)
    step = stepper(model, optimizer, scale=scale)
    for number in range(3):
        step(*batch(world.rank, number))
        world.same(flat(model))
    expected, plain = reference(world, make, 3, scale)
    assert close(weights(model), weights(expected))
    assert close(state(optimizer), state(plain))
    if option == "ema":
        optimizer.finalize_variable_values(model.trainable_variables)
        plain.finalize_variable_values(expected.trainable_variables)
        assert close(weights(model), weights(expected))


@on_time
@mainly_on_torch
def test_constraint(world: World, policy: str) -> None:
    options = {"kernel_constraint": keras.constraints.UnitNorm()}
    model = make_model(**options)
    step = stepper(model, hvd.DistributedOptimizer(sgd(), sync=policy))
    for number in range(3):
        step(*batch(world.rank, number))
    assert np.linalg.norm(weights(model)[0], axis=0) == pytest.approx(1.0, abs=1e-5)
    assert as_one(world, model, sgd, 3, **options)


@on_time
def test_learning_rate(world: World, policy: str) -> None:
    """Set by a callback, and by hand."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), sync=policy)
    model.compile(optimizer, "mse")
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * (epoch + 1))
    x, y = batch(world.rank, 0)
    model.fit(x, y, batch_size=SAMPLES, epochs=2, callbacks=[schedule], verbose=0, shuffle=False)
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    optimizer.learning_rate = 0.3
    model.fit(x, y, batch_size=SAMPLES, verbose=0, shuffle=False)
    expected = make_model()
    plain = keras.optimizers.SGD(1.0)
    step = stepper(expected, plain)
    for rate in (0.1, 0.2, 0.3):
        plain.learning_rate = rate
        step(*joined(world, 0))
    assert close(weights(model), weights(expected))


def accumulating() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)


ACCUMULATIONS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "keras": (accumulating, {}),
    "average": (sgd, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}),
    "loss scale": (lambda: keras.optimizers.LossScaleOptimizer(accumulating(), initial_scale=64.0), {}),
}


@on_time
@pytest.mark.parametrize("kind", ACCUMULATIONS)
def test_accumulated_gradients(world: World, policy: str, kind: str) -> None:
    """One exchange for two passes, but where a `LossScaleOptimizer` hides that there are two."""
    make, options = ACCUMULATIONS[kind]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make(), sync=policy, **options)
    step = stepper(model, optimizer, in_graph(policy))
    for number in range(6):
        before = flat(model)
        step(*batch(world.rank, number))
        assert (flat(model) == before) == (number % 2 == 0)
        world.same(flat(model))
    assert as_one(world, model, sgd, 3, passes=2)
    if kind != "loss scale":
        assert optimizer.rounds == 3


@pytest.mark.usefixtures("heals")
@pytest.mark.parametrize("passes", [1, 2])
@mainly_on_torch
def test_ranks_that_begin_with_different_models_are_told(
    world: World, graph: bool, passes: int, caplog: pytest.LogCaptureFixture
) -> None:
    for apart in (False, True):
        model = make_model()
        if apart and world.rank == 1:
            model.set_weights([weight + 1.0 for weight in model.get_weights()])
        optimizer = hvd.DistributedOptimizer(sgd(), sync="solo", backward_passes_per_step=passes)
        step = stepper(model, optimizer, graph)
        for number in range(3 * passes):
            step(*batch(world.rank, number))
        told = "the parameters of rank(s) 1 are not those of rank 0" in caplog.text
        assert told == (apart and world.rank == 0)
        optimizer.flush()
        world.same(flat(model))


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


@alone
def test_mixed_precision_that_is_known_too_late(world: World) -> None:
    with dtype_policy("mixed_float16"):
        model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=EVERYBODY)
    with pytest.raises(ValueError, match="wrap the outermost optimizer"):
        model.compile(optimizer, "mse")


@alone
@pytest.mark.parametrize("make", ["SGD", "MultiOptimizer"])
def test_wrapped_by_a_loss_scale_optimizer(world: World, make: str) -> None:
    for policy in ("full", "solo", hvd.GroupAverage(2)):
        with pytest.raises(ValueError, match="wrap the outermost optimizer"):
            keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(MAKERS[make](), sync=policy))


@pytest.mark.parametrize(
    ("policy", "precision"),
    [  # Horovod's operations of TensorFlow take no bfloat16
        *((EVERYBODY, precision) for precision in ("mixed_bfloat16", "bfloat16", "float64")),
        *(("full", precision) for precision in ("mixed_bfloat16", "float64")),
    ],
)
def test_other_precisions(world: World, policy: str, precision: str) -> None:
    with dtype_policy(precision):
        model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), sync=policy), "mse")
    x, y = batch(world.rank, 0)
    model.fit(x, y, batch_size=SAMPLES, epochs=2, verbose=0)
    world.same([weight.astype("float64").tolist() for weight in weights(model)])
    dtype = precision.replace("mixed_bfloat16", "float32")
    assert {variable.dtype for variable in model.trainable_variables} == {dtype}


# --- Arguments of Horovod's -------------------------------------------------------------------------------------------


@on_time
@pytest.mark.parametrize("scaled", [True, False])
def test_local_variables(world: World, policy: str, scaled: bool) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync=policy, scale_local_gradients=scaled)
    local, shared = model.trainable_variables[0], model.trainable_variables[1]
    optimizer.register_local_var(local)
    step = stepper(model, optimizer, in_graph(policy))
    step(*batch(world.rank, 0))
    alone = make_model()
    stepper(alone, keras.optimizers.SGD(0.1 / world.size if scaled else 0.1))(*batch(world.rank, 0))
    assert close([local.numpy()], weights(alone)[:1])
    expected, _ = reference(world, lambda: keras.optimizers.SGD(0.1), 1)
    assert close(weights(model)[1:], weights(expected)[1:])
    optimizer.register_local_var(shared)  # from now on
    if not in_graph(policy):
        step(*batch(world.rank, 1))
        everybody = world.gather(weights(model))
        assert not close(everybody[0][1:2], everybody[1][1:2])


# --- Saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "make"),
    [("full", "Adam"), (EVERYBODY, "LossScaleOptimizer"), (EVERYBODY, "MultiOptimizer"), ("ready", "Adam")],
)
def test_saved_models_hold_the_plain_optimizer(world: World, policy: str, make: str, tmp_path: Path) -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(MAKERS[make](), sync=sync_of(policy)), "mse", run_eagerly=True)
    x, y = batch(world.rank, 0)
    model.fit(x, y, batch_size=SAMPLES, epochs=2, verbose=0)
    model.optimizer.flush()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(MAKERS[make]())
    assert not hasattr(loaded.optimizer, "is_horovod_partial")
    assert flat(loaded) == flat(model)
    assert [one.tolist() for one in state(loaded.optimizer)] == [one.tolist() for one in state(model.optimizer)]
    if policy != "ready":  # wrapped again it goes on as the other does
        step = stepper(model, model.optimizer)
        again = stepper(loaded, hvd.DistributedOptimizer(loaded.optimizer, sync=policy))
        step(*batch(world.rank, 1))
        again(*batch(world.rank, 1))
        assert close(weights(loaded), weights(model))


@alone
def test_saved_weights(world: World, tmp_path: Path) -> None:
    """A checkpoint of the optimizer goes into a wrapped one of the same kind."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS["Adam"](), sync=EVERYBODY)
    model.compile(optimizer, "mse", run_eagerly=True)
    step = stepper(model, optimizer)
    for number in range(2):
        step(*batch(world.rank, number))
    model.save_weights(tmp_path / "model.weights.h5")
    other = make_model()
    other.compile(hvd.DistributedOptimizer(MAKERS["Adam"](), sync=EVERYBODY), "mse", run_eagerly=True)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    assert close(state(other.optimizer), state(optimizer))
    step(*batch(world.rank, 2))
    stepper(other, other.optimizer)(*batch(world.rank, 2))
    assert close(weights(other), weights(model))


@alone
@pytest.mark.parametrize("make", MAKERS)
def test_configuration(world: World, make: str) -> None:
    plain = MAKERS[make]()
    expected = plain.get_config()
    optimizer = hvd.DistributedOptimizer(plain, sync="majority", groups=2)
    assert optimizer.get_config() == expected
    assert (type(optimizer).__name__, type(optimizer).__module__) == (type(plain).__name__, type(plain).__module__)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.is_horovod_partial
    assert again.get_config() == expected
    assert again._horovod_arguments == optimizer._horovod_arguments
    # As Keras does with a plain one, which it does not know how to load if it is Lamb.
    both = (optimizer, MAKERS[make]())
    loaded, reloaded = [keras.optimizers.deserialize(keras.optimizers.serialize(one)) for one in both]
    assert type(loaded) is type(reloaded)


@alone
def test_configuration_of_backward_passes(world: World) -> None:
    optimizer = hvd.DistributedOptimizer(sgd(), sync=EVERYBODY, backward_passes_per_step=2)
    again = type(optimizer).from_config(optimizer.get_config())
    model = make_model()
    step = stepper(model, again)
    for number in range(4):
        step(*batch(world.rank, number))
    assert as_one(world, model, sgd, 2, scale=2.0, passes=2)


@mainly_on_torch
def test_two_wrappers_of_one_optimizer(world: World) -> None:
    """Each has its own operation; they share the optimizer's state."""
    weight = keras.Variable(np.zeros(2))
    bare = keras.optimizers.SGD(1.0)
    average, total = (hvd.DistributedOptimizer(bare, sync=EVERYBODY, op=op) for op in (hvd.Average, hvd.Sum))
    gradient = keras.ops.full((2,), world.rank + 1.0)
    average.apply([gradient], [weight])
    total.apply([gradient], [weight])
    summed = sum(rank + 1.0 for rank in world.ranks)
    assert close([weight], [np.full(2, -summed / world.size - summed)])
    assert int(bare.iterations) == 2


# --- Layers that are frozen -------------------------------------------------------------------------------------------


def fit(model: keras.Model, world: World, graph: bool, optimizer: Any) -> list[str]:
    """Compile and train for some steps, and flush; returns what was warned of."""
    model.compile(optimizer, "mse", run_eagerly=not graph, jit_compile=False)
    x, y = concatenated([batch(world.rank, number) for number in range(6)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=SAMPLES, shuffle=False, verbose=0, callbacks=[Slow()])
    return [str(one.message) for one in caught if "optimizer" in str(one.message)]


@pytest.mark.parametrize("policy", ["majority", pytest.param("full", marks=LONG), pytest.param("solo", marks=LONG)])
@mainly_on_torch
def test_layers_are_frozen_and_unfrozen(world: World, policy: str, graph: bool) -> None:
    """After a flush. What is unfrozen needs an optimizer that has state for it."""
    model = make_model()
    first = model.layers[0]
    new = lambda: hvd.DistributedOptimizer(MAKERS["Adam"](), sync=policy)

    def moves(optimizer: Any) -> bool:
        before = flat(first)
        assert fit(model, world, graph, optimizer) == []
        optimizer.flush()
        hvd.assert_replicas_equal(model, optimizer)
        return flat(first) != before

    optimizer = new()
    assert moves(optimizer)
    first.trainable = False
    assert not moves(optimizer)
    first.trainable = True
    assert moves(optimizer)
    first.trainable = False
    optimizer = new()
    assert not moves(optimizer)
    first.trainable = True
    with pytest.raises(ValueError, match=r"kernel was not trained when the optimizer was built.* wrap a new optimizer"):
        moves(optimizer)
    optimizer.flush()  # which knows nothing of it
    assert moves(new())


@pytest.mark.parametrize("policy", MODELS)
@mainly_on_torch
def test_layers_that_are_frozen_under_policies_of_models(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync=sync_of(policy))
    assert fit(model, world, False, optimizer) == []
    optimizer.flush()
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"other variables than in its first step.* then wrap a new optimizer"):
        fit(model, world, False, optimizer)
    optimizer.flush()
    before = flat(model.layers[0])
    optimizer = hvd.DistributedOptimizer(sgd(), sync=sync_of(policy))
    assert fit(model, world, False, optimizer) == []
    optimizer.flush()
    world.same(flat(model))
    assert flat(model.layers[0]) == before


@pytest.mark.usefixtures("heals")
@pytest.mark.parametrize("anew", [False, True], ids=["same", "new"])
@mainly_on_torch
def test_layers_that_are_frozen_without_a_flush(world: World, anew: bool, graph: bool) -> None:
    """Ranks apply the rounds of both optimizers, or of both sets of variables, in different orders, until they flush."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), sync="majority")
    assert fit(model, world, graph, optimizer) == []
    model.layers[0].trainable = False
    if anew:
        warned = fit(model, world, graph, hvd.DistributedOptimizer(sgd(), sync="majority"))
        (text,) = warned
        assert text.startswith("an optimizer begins to train what another one has trained")
    else:
        assert fit(model, world, graph, optimizer) == []
        optimizer.flush()
        hvd.assert_replicas_equal(model, optimizer)
    hvd.flush()


@pytest.mark.usefixtures("heals")
@pytest.mark.parametrize("flushes", [False, True], ids=["bare", "flushed"])
@mainly_on_torch
def test_a_learning_rate_that_changes_between_epochs(world: World, flushes: bool) -> None:
    """Ranks are in different rounds then, unless they have flushed; a flush makes them equal again."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS["Adam"](), sync="majority")
    model.compile(optimizer, "mse", jit_compile=False)
    changing = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    x, y = concatenated([batch(world.rank, number) for number in range(6)])
    callbacks = [Slow(), changing, *([hvd.callbacks.FlushCallback()] if flushes else [])]
    model.fit(x, y, batch_size=SAMPLES, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    optimizer.flush()
    hvd.assert_replicas_equal(model, optimizer)


# --- Errors -----------------------------------------------------------------------------------------------------------


@alone
@pytest.mark.parametrize("policy", ["full", "solo", "group"])
def test_moving_averages_of_accumulated_gradients(world: World, policy: str) -> None:
    """Only where rounds are replayed ranks would differ; what is refused stays as it was."""
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    wrap = lambda sync: hvd.DistributedOptimizer(optimizer, sync=sync, backward_passes_per_step=2)
    if policy == "solo":
        with pytest.raises(ValueError, match=r"use_ema cannot be used with gradient accumulation under Solo\(\)"):
            wrap("solo")
        assert optimizer.gradient_accumulation_steps is None
        return
    wrap(sync_of(policy))
    assert optimizer.gradient_accumulation_steps == 2


@alone
def test_only_the_newest_missed_result_is_for_pytorch(world: World) -> None:
    with pytest.raises(ValueError, match=r"Solo\(missed='latest'\) is for PyTorch, .*: leave missed= out"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync="solo:missed=latest")


COUNTS: list[Any] = ["1", 1.5, True, [1], int, 0]
NUMBERS: list[Any] = ["1", True, [1], float]
CALLBACKS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "BroadcastGlobalVariablesCallback": (
        {"root_rank": 0},
        {"root_rank": ["0", 1.5, True, None, [1], -1], "device": [1], "local_variables": [1, "x"]},
    ),
    "MetricAverageCallback": ({}, {"device": [1]}),
    "LearningRateScheduleCallback": (
        {"initial_lr": 0.1, "multiplier": 1.0},
        {
            "initial_lr": [None, *NUMBERS],
            "multiplier": [None, "1", True, [1]],
            "start_epoch": [None, *NUMBERS],
            "end_epoch": NUMBERS,
            "staircase": ["yes", None],
            "momentum_correction": ["yes", None],
            "steps_per_epoch": COUNTS,
        },
    ),
    "LearningRateWarmupCallback": ({"initial_lr": 0.1}, {"initial_lr": [None, *NUMBERS], "warmup_epochs": NUMBERS}),
    "ModelSyncCallback": ({}, {"every_n_steps": COUNTS, "every_n_epochs": COUNTS}),
    "PartialStatsCallback": ({}, {"process_set": NONSENSE["process_set"]}),
}


@alone
@pytest.mark.parametrize("name", CALLBACKS)
def test_arguments_of_a_wrong_kind_of_callbacks(world: World, name: str) -> None:
    needed, nonsense = CALLBACKS[name]
    kind = getattr(hvd, name, None) or getattr(hvd.callbacks, name)
    check_nonsense(lambda **wrong: kind(**(needed | wrong)), nonsense)


@alone
def test_arguments_of_a_wrong_kind_of_functions(world: World) -> None:
    model = make_model()
    check_nonsense(
        lambda **wrong: hvd.assert_replicas_equal(**({"model": model} | wrong)),
        {"model": [None, 1, "x", keras.Model, [model]], "optimizer": [1, "x", keras.optimizers.SGD]},
    )
    partial = lambda **wrong: hvd.PartialDistributedOptimizer(sgd(), **wrong)
    check_nonsense(partial, {"local_layers": [1, "x", [3], keras.layers.Dense]})
    check_nonsense(hvd.flush, {"process_set": NONSENSE["process_set"]})


@alone
def test_arguments_that_do_not_fit_change_nothing(world: World) -> None:
    optimizer = sgd()
    with pytest.raises(ValueError, match="predivide"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, gradient_predivide_factor=2.0, op=hvd.Sum)
    assert optimizer.gradient_accumulation_steps is None


@alone
@on_time
def test_no_gradient_at_all(world: World, policy: str) -> None:
    weight = keras.Variable(np.ones(2))
    optimizer = hvd.DistributedOptimizer(sgd(), sync=policy)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None], [weight])
