"""Callbacks of Keras 3, saved models, and Horovod's optimizer that skips layers."""

import gc
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.keras_training import Slow, ended
from harness.matrix import alone, keras_front_end, mainly_on_torch
from harness.world import World

import horovod_partial.keras as hvd
from horovod_partial.runtime import healing

pytestmark = [keras_front_end, pytest.mark.one_in(3)]

STEPS = 3  # of an epoch
BATCH = 4

LONG = pytest.mark.full_matrix


def make_model(seed: int, *, built: bool = True) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(3, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((2,)), *layers] if built else layers)


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(size=(STEPS * BATCH, 2)).astype("float32")
    return x, x.sum(1, keepdims=True)


def fit(world: World, model: keras.Model, callbacks: list[Any], epochs: int = 1) -> dict[str, list[float]]:
    options = {"batch_size": BATCH, "epochs": epochs, "verbose": 0, "shuffle": False}
    return model.fit(*data(world.rank), callbacks=callbacks, **options).history


def compiled(model: keras.Model, sync: str = "full") -> keras.Model:
    sync += ":max_staleness=2" if sync in ("solo", "majority") else ""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), sync=sync)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def values(variables: Any) -> list[list[float]]:
    return [np.asarray(variable).reshape(-1).tolist() for variable in variables]


class Before(keras.callbacks.Callback):
    """Notes something before the first step."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self._note = note
        self.noted: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.noted is None:
            self.noted = self._note()


# --- Broadcast


def test_broadcast_before_the_first_step(world: World) -> None:
    """Also where variables have other names: Keras counts models and layers, and a rank has made one more."""
    if world.rank == 0:
        make_model(0)
    model = compiled(make_model(world.rank))
    model.optimizer.build(model.trainable_weights)
    everything = [*model.weights, *model.optimizer.all_variables]
    for variable in everything:  # as after a training of this rank alone
        variable.assign(variable + world.rank)
    expected = world.gather(values(everything))[1]
    before = Before(lambda: values(everything))
    fit(world, model, [hvd.callbacks.BroadcastGlobalVariablesCallback(1), before])
    assert before.noted == expected


@mainly_on_torch
def test_broadcast_of_another_model(world: World) -> None:
    model = make_model(0)
    if world.rank == 0:
        model.add(keras.layers.Dense(1))
    with pytest.raises(ValueError, match="ranks have different variables: number "):
        fit(world, compiled(model), [hvd.callbacks.BroadcastGlobalVariablesCallback(1)])


class Subclassed(keras.Model):
    """Its `build` makes no weights. The first batch makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("subclassed", [False, True])
@mainly_on_torch
def test_broadcast_of_a_model_that_its_first_batch_builds(world: World, subclassed: bool) -> None:
    model = compiled(make_model(world.rank, built=False))
    if subclassed:
        model = compiled(Subclassed())
        model.build((None, 2))
    fit(world, model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    world.same(values(model.trainable_weights))
    world.same(values(model.optimizer.variables))


@mainly_on_torch
def test_broadcast_leaves_local_variables_alone(world: World) -> None:
    model = compiled(make_model(world.rank))
    local = model.layers[0].kernel
    own = values([local])
    before = Before(lambda: (values([local]), values(model.trainable_weights[1:])))
    fit(world, model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local), before])
    assert before.noted[0] == own
    world.same(before.noted[1])
    with pytest.raises(ValueError, match="local_variables must be"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["kernel"])


# --- Metrics


def test_metrics_are_averaged(world: World) -> None:
    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            assert logs is not None
            own.append(float(logs["loss"]))

    own: list[float] = []
    history = fit(world, compiled(make_model(0)), [Own(), hvd.callbacks.MetricAverageCallback()], epochs=2)
    for mean, of_ranks in zip(history["loss"], zip(*world.gather(own), strict=True), strict=True):
        assert mean == pytest.approx(sum(of_ranks) / world.size)
    world.same(history["loss"])


# --- Learning rate


@pytest.mark.parametrize(
    ("multiplier", "options", "rates"),
    [
        (lambda epoch: 0.5**epoch, {"start_epoch": 1, "end_epoch": 3}, [0.1, 0.05, 0.025, 0.025]),
        (0.5, {}, [0.1, 0.05, 0.025]),
        (lambda epoch: 1 + epoch, {"staircase": False}, [0.1 * (1 + 2 / 3), 0.1 * (2 + 2 / 3)]),
    ],
    ids=["in steps", "a number decays", "within epochs"],
)
@mainly_on_torch
def test_a_schedule(world: World, multiplier: Any, options: dict[str, Any], rates: list[float]) -> None:
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier, **options)
    assert fit(world, compiled(make_model(0)), [schedule], epochs=len(rates))["lr"] == pytest.approx(rates)


@mainly_on_torch
def test_warm_up(world: World) -> None:
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    history = fit(world, compiled(make_model(0)), [warm_up], epochs=3)
    first = 0.1 / world.size * ((world.size - 1) / 2 + 1)
    assert history["lr"] == pytest.approx([first, 0.1, 0.1])


@pytest.mark.parametrize("corrected", [True, False])
def test_momentum_follows_the_learning_rate(world: World, corrected: bool) -> None:
    """As Horovod's on Keras 2: for the batch in which the rate changes, momentum is multiplied by the same factor."""

    def train(callbacks: list[Any], momentum_of: dict[int, float] | None) -> list[list[float]]:
        keras.utils.set_random_seed(1)
        weight = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        if momentum_of is None:
            compiled(weight)
            fit(world, weight, callbacks, epochs=2)
            return values(weight.weights)
        kernel, velocity = weight.get_weights()[0].astype("float64"), 0.0
        for step in range(2 * STEPS):
            gradients = []
            for rank in world.ranks:
                x, y = (part[step % STEPS * BATCH :][:BATCH].astype("float64") for part in data(rank))
                gradients.append(2 * x.T @ (x @ kernel - y) / BATCH)
            rate = 0.1 if step < STEPS else 0.02
            velocity = momentum_of.get(step, 0.9) * velocity - rate * sum(gradients) / world.size
            kernel = kernel + velocity
        return values([kernel])

    factor = lambda epoch: 0.2 if epoch else 1.0
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, factor, momentum_correction=corrected)
    expected = train([], {STEPS: 0.9 * 0.2} if corrected else {})
    assert train([schedule], None)[0] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize(
    ("policy", "corrected"),
    [("solo", True), pytest.param("majority", True, marks=LONG), pytest.param("solo", False, marks=LONG)],
)
def test_each_round_has_the_rate_of_its_step(world: World, policy: str, corrected: bool) -> None:
    """With a late rank, too, which applies several rounds at once: replicas that part raise in a flush."""
    model = compiled(make_model(0), policy)
    late = [Slow(), hvd.callbacks.FlushCallback()]
    fit(world, model, late, epochs=2)  # its graph is there before the callbacks
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, momentum_correction=corrected)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=4, momentum_correction=corrected)
    rates = fit(world, model, [warm_up, decay, *late], epochs=6)["lr"]
    world.same(rates)
    assert rates[0] < rates[1] < 0.1 + 1e-6
    assert rates[2:] == pytest.approx([0.1, 0.1, 0.1, 0.05])
    hvd.assert_replicas_equal(model, model.optimizer)
    model.optimizer.learning_rate = 0.3
    fit(world, model, late)  # without them
    assert float(model.optimizer.learning_rate) == pytest.approx(0.3)


@alone
def test_the_last_rate_is_set_though_no_round_begins_there(world: World) -> None:
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, 1, 3, staircase=False)
    schedule.set_model(compiled(make_model(0), "solo"))
    schedule.set_params({"steps": STEPS})
    schedule.on_train_begin()
    schedule.on_epoch_begin(0)
    assert schedule.rate_after(STEPS - 1) is None
    assert schedule.rate_after(3 * STEPS - 2) == pytest.approx(0.1 * (4 - 2 / STEPS))
    assert schedule.rate_after(3 * STEPS + 1) == pytest.approx(0.1 * (4 - 1 / STEPS))
    assert schedule.rate_after(3 * STEPS + 1) is None


@alone
def test_a_rate_that_a_schedule_sets(world: World) -> None:
    model = make_model(0)
    rate = keras.optimizers.schedules.CosineDecay(0.1, STEPS)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate), sync="solo"), "mse", jit_compile=False)
    with pytest.raises(TypeError, match="not settable"):
        fit(world, model, [hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)])


@alone
def test_a_schedule_needs_a_rate_and_steps(world: World) -> None:
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)  # type: ignore[arg-type]
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, 1.0, staircase=False)
    schedule.set_params({})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        schedule.on_train_begin()


# --- Flush, sync, statistics


@mainly_on_torch
def test_a_late_rank_is_told_where_it_saves_without_a_flush(world: World, tmp_path: Path) -> None:
    model = make_model(0)
    # Rounds of a flush count as missed by a rank that has nothing to deliver: a low bound on staleness would hold the others.
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sync="solo"), "mse", jit_compile=False)
    fit(world, model, [hvd.callbacks.FlushCallback()])
    assert model.optimizer.flushed()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save(tmp_path / "model.keras")
    rounds = model.optimizer.rounds
    world.barrier()
    if world.rank == 1:  # the others go on
        world.until(lambda: ended(model.optimizer) > rounds, "a round has ended without this rank")
    fit(world, model, [])
    if not model.optimizer.flushed():
        with pytest.warns(UserWarning, match="the optimizer was saved while this rank has late gradients"):
            model.save(tmp_path / "model.keras")
    model.optimizer.flush()
    assert model.optimizer.flushed()


@mainly_on_torch
def test_an_optimizer_may_go_while_replicas_are_compared(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may find it at any time, and on each rank at another one."""

    def taken_late(*arguments: Any) -> None:
        gone.clear()
        if world.rank == 0:
            gc.collect()
        compare(*arguments)

    compare = healing.compare
    monkeypatch.setattr(healing, "compare", taken_late)
    gone, kept = [compiled(make_model(0), "quorum:1.0")], compiled(make_model(1), "quorum:1.0")
    for model in kept, gone[0]:
        fit(world, model, [])
    del model
    kept.optimizer.flush()
    gc.collect()
    fit(world, kept, [hvd.callbacks.FlushCallback()])
    hvd.assert_replicas_equal(kept, kept.optimizer)


@pytest.mark.parametrize("sync", ["full", "quorum:1.0"])
def test_replicas_are_compared(world: World, sync: str) -> None:
    model = compiled(make_model(0), sync)
    fit(world, model, [])
    hvd.assert_replicas_equal(model, model.optimizer)
    if world.rank == 1:
        momentum = model.optimizer.variables[-1]
        momentum.assign(momentum * 1.001)
    hvd.assert_replicas_equal(model)
    told = r"1 of \d+ tensors: optimizer's variable \d+ \S*momentum\S* of rank\(s\) 1 is not"
    with pytest.raises(AssertionError, match=told):
        hvd.assert_replicas_equal(model, model.optimizer)


@alone
def test_flush_needs_a_wrapped_optimizer(world: World) -> None:
    model = make_model(0)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        fit(world, model, [hvd.callbacks.FlushCallback()])


@pytest.mark.parametrize("when", [{"every_n_steps": STEPS}, {"every_n_epochs": 2}], ids=["steps", "epochs"])
def test_a_sync_makes_models_equal(world: World, when: dict[str, int]) -> None:
    model = make_model(world.rank)
    model.compile("sgd", "mse")  # each rank by itself
    fit(world, model, [hvd.callbacks.ModelSyncCallback(**when)], epochs=2)
    world.same(values(model.weights))  # BatchNorm's statistics too


def syncing(world: World) -> tuple[keras.Model, keras.callbacks.Callback]:
    """A model of the rank's own, and the callback that averages it after each step."""
    model = make_model(world.rank)
    model.compile("sgd", "mse")
    callback = hvd.callbacks.ModelSyncCallback(every_n_steps=1)
    callback.set_model(model)
    return model, callback


@mainly_on_torch
def test_a_sync_is_the_mean(world: World) -> None:
    model, callback = syncing(world)
    means = np.mean(np.array(world.gather(model.get_weights()[0].tolist())), 0)
    callback.on_train_batch_end(0)
    assert np.allclose(model.get_weights()[0], means, atol=1e-6)


@pytest.mark.usefixtures("heals")
@mainly_on_torch
def test_a_late_rank_leaves_an_old_average_out(world: World) -> None:
    model, callback = syncing(world)
    callback.on_train_batch_end(0)
    if world.rank == 0:
        callback.on_train_batch_end(1)  # while all others are out of training
    hvd.flush()
    if world.rank > 0:
        model.set_weights([weight + 1.0 for weight in model.get_weights()])
        before = values(model.weights)
        callback.on_train_batch_end(1)
        assert values(model.weights) == before
    world.barrier()


@alone
@pytest.mark.parametrize("arguments", [{}, {"every_n_steps": 1, "every_n_epochs": 1}, {"every_n_steps": 0}])
def test_a_sync_needs_one_interval(world: World, arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"every_n_(steps|epochs)"):
        hvd.callbacks.ModelSyncCallback(**arguments)


def test_statistics_are_those_of_the_epoch(world: World) -> None:
    history = fit(world, compiled(make_model(0), "quorum:1.0"), [hvd.callbacks.PartialStatsCallback()], epochs=2)
    assert history["late"] == [0.0, 0.0]
    assert history["fresh"] == [float(world.size)] * 2
    assert history["staleness"] == [0.0, 0.0]


@mainly_on_torch
def test_statistics_do_without_buckets_that_have_ended(world: World) -> None:
    model = compiled(make_model(0), "quorum:1.0")
    fit(world, model, [])
    callback = hvd.callbacks.PartialStatsCallback()
    callback.on_train_begin()
    buckets = set(hvd.partial_stats())
    model = None
    gc.collect()
    fit(world, compiled(make_model(1), "quorum:1.0"), [])
    assert not buckets <= set(hvd.partial_stats())
    logs: dict[str, float] = {}
    callback.on_epoch_end(0, logs)
    assert logs.pop("waited_seconds") >= 0
    assert logs == {"late": 0.0, "fresh": float(world.size), "staleness": 0.0}


@mainly_on_torch
def test_there_are_no_statistics_under_full(world: World) -> None:
    assert "late" not in fit(world, compiled(make_model(0)), [hvd.callbacks.PartialStatsCallback()])


# --- Saving


def test_a_loaded_model_goes_on(world: World, tmp_path: Path) -> None:
    model = compiled(make_model(0))
    fit(world, model, [])
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", sync="quorum:1.0")
    assert values(loaded.optimizer.variables) == values(model.optimizer.variables)
    fit(world, model, [])
    fit(world, loaded, [])
    for one, other in zip(values(loaded.trainable_weights), values(model.trainable_weights), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert loaded.optimizer.rounds == STEPS


@pytest.mark.parametrize("sync", ["solo", pytest.param("full", marks=LONG)])
@mainly_on_torch
def test_a_schedule_goes_on_where_it_was_saved(world: World, tmp_path: Path, sync: str) -> None:
    """Also under another policy. For Keras the file is one of its own."""
    model = make_model(0)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(rate), sync="solo"), "mse", jit_compile=False)
    fit(world, model, [Slow(), hvd.callbacks.FlushCallback()], epochs=3)
    rounds = int(model.optimizer.iterations)
    assert rounds >= 3 * STEPS
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", sync=sync)
    assert values(loaded.optimizer.all_variables) == values(model.optimizer.all_variables)
    assert float(loaded.optimizer.learning_rate) == float(rate(3 * STEPS))
    fit(world, loaded, [Slow(), *([] if sync == "full" else [hvd.callbacks.FlushCallback()])])
    assert float(loaded.optimizer.learning_rate) == float(rate(4 * STEPS))
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert values(plain.optimizer.variables) == values(model.optimizer.variables)
    plain.save(tmp_path / "plain.keras")
    loaded.load_weights(tmp_path / "plain.keras")
    assert float(loaded.optimizer.learning_rate) == float(rate(rounds))


@alone
def test_there_are_no_legacy_optimizers(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="legacy"):
        hvd.load_model(tmp_path / "model.keras", legacy_opts=True)


@mainly_on_torch
def test_the_best_model_of_one_rank_is_saved(world: World, tmp_path: Path) -> None:
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    model = compiled(make_model(0))
    with pytest.raises(ValueError, match="filepath of BestModelCheckpoint"):
        best.on_train_begin()
    best.filepath = str(tmp_path / "best.weights.h5")
    fit(world, model, [best] if world.rank == 0 else [], epochs=2)
    if world.rank == 0:
        again = make_model(1)
        again.load_weights(best.filepath)
        assert best.best == min(model.history.history["loss"])


@alone
def test_there_are_no_global_variables(world: World) -> None:
    with pytest.raises(RuntimeError, match=r"hvd.broadcast_variables\(model.weights, root_rank=1\)"):
        hvd.broadcast_global_variables(1)


@pytest.mark.parametrize("sync", ["full", "quorum:1.0"])
@mainly_on_torch
def test_a_rank_that_has_made_another_model(world: World, sync: str) -> None:
    """Keras numbers layers through the process, and so differently from here on."""
    if world.rank == 0:
        make_model(1)
    model = compiled(make_model(0), sync)
    fit(world, model, [])
    world.same(values(model.trainable_weights))


# --- Layers of one's own


@pytest.mark.parametrize("sync", ["full", "quorum:1.0"])
def test_local_layers_are_left_alone(world: World, sync: str) -> None:
    model = make_model(0)
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.PartialDistributedOptimizer(plain, local_layers=model.layers[-1], sync=sync)
    model.compile(optimizer, "mse", jit_compile=False)
    fit(world, model, [hvd.callbacks.FlushCallback()])  # raises where it would make other replicas equal
    momenta = world.gather(values(plain.momentums[-2:]))
    assert momenta[0] != momenta[1]
    world.same(values(model.layers[0].weights))
    heads = world.gather(values(model.layers[-1].weights))
    assert all(one != other for head in heads[1:] for one, other in zip(head, heads[0], strict=True))
    hvd.assert_replicas_equal(model, optimizer)
    model.layers[0].bias.assign_add([float(world.rank)] * model.layers[0].bias.shape[0])
    with pytest.raises(AssertionError, match="replicas differ in 1 of"):
        hvd.assert_replicas_equal(model, optimizer)
    with pytest.raises(ValueError, match="local_layers must be"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["dense"])
