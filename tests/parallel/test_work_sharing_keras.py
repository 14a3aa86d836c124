"""`sync=hvd.WorkSharing()` in Keras: on TensorFlow here, and on PyTorch in `test_work_sharing_keras_torch`."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.keras_training import close, flat, make_model, weights
from harness.matrix import keras_front_end, mainly_on_torch
from harness.world import World

import horovod_partial.keras as hvd
from horovod_partial.keras.dynamic_sharding import DynamicShardingDataset

pytestmark = [keras_front_end, pytest.mark.one_in(6)]  # graphs take long to trace

PASSES, BATCH, UPDATES = 2, 3, 4
on_tensorflow = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")


@pytest.fixture(autouse=True)
def _no_optimizer_is_left() -> Iterator[None]:
    """Ends the optimizers of a test on all ranks, also those that have begun a micro-batch: flushes wait for them."""
    yield
    gc.collect()


MAKERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "scheduled": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.05, 6)),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=1024.0),
    "averaged": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5),
}


def data(world: World, updates: int = UPDATES) -> tuple[np.ndarray, np.ndarray]:
    """As many samples as an epoch of so many updates has."""
    generator = np.random.default_rng(7)
    samples = updates * PASSES * world.size * BATCH
    x = generator.normal(size=(samples, 4)).astype("float32")
    return x, np.tanh(x[:, :2] - x[:, 2:])


def wrap(make: Callable[[], Any] = MAKERS["adam"], **options: Any) -> Any:
    arguments = {"backward_passes_per_step": PASSES, "average_aggregated_gradients": True, "sync": "work_sharing"}
    return hvd.DistributedOptimizer(make(), **arguments | options)


def compiled(optimizer: Any, **options: Any) -> keras.Model:
    model = make_model()
    model.compile(optimizer, "mse", **options)
    return model


def training(world: World, **options: Any) -> tuple[keras.Model, Any, DynamicShardingDataset]:
    """A model, its optimizer and its data."""
    optimizer = wrap(MAKERS["sgd"], **options)
    dataset = DynamicShardingDataset(*data(world), optimizer=optimizer, batch_size=BATCH)
    return compiled(optimizer), optimizer, dataset


class Paced(keras.callbacks.Callback):
    """Lets rank 1 end a micro-batch when the others have made all that are left of its update, but for the first update."""

    def __init__(self, world: World, optimizer: Any) -> None:
        super().__init__()
        self.world, self.optimizer_ = world, optimizer
        self.batches: list[int] = []  # by epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.batches.append(0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        sharing = self.optimizer_._horovod.sharing
        if sharing is None or sharing.work.begun is None:
            return
        update, number = self.optimizer_.rounds, sharing.work.begun
        if self.world.rank == 1 and update > 0:
            for other in range(PASSES * self.world.size):
                if other != number:
                    self.world.wait_for(f"{update}.{other}")
        self.begun = update, number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches[-1] += 1


class Telling(DynamicShardingDataset):
    """Tells the other ranks which micro-batch this one makes, when it loads its data."""

    world: World

    def _load(self, indices: list[int]) -> Any:
        sharing = self._optimizer._horovod.sharing
        if sharing is not None and sharing.work.begun is not None:
            self.world.tell(f"{self._optimizer.rounds}.{sharing.work.begun}")
        return super()._load(indices)


def reference(world: World, make: Callable[[], Any], epochs: int = 2) -> keras.Model:
    """The same training in one process: each update has the mean gradient of all its micro-batches."""
    x, y = data(world)
    model = make_model()
    optimizer = make()
    model.compile(optimizer, "mse")
    of_update = PASSES * world.size * BATCH
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(len(x))
        for update in range(UPDATES):
            chosen = order[update * of_update : (update + 1) * of_update]
            model.train_on_batch(x[chosen], y[chosen])
    model.optimizer.finalize_variable_values(model.trainable_weights)  # `fit` does this
    return model


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("eager", [False, True])
def test_weights_are_those_of_synchronous_training_and_equal_on_all_ranks(world: World, name: str, eager: bool) -> None:
    optimizer = wrap(MAKERS[name])
    model = compiled(optimizer, run_eagerly=eager)
    dataset = Telling(*data(world), optimizer=optimizer, batch_size=BATCH)
    dataset.world = world
    paced = Paced(world, optimizer)
    model.fit(dataset, epochs=2, callbacks=[paced], verbose=0)
    world.same(flat(model))
    assert optimizer.rounds == 2 * UPDATES
    assert int(optimizer.iterations) == 2 * UPDATES
    assert close(weights(model), weights(reference(world, MAKERS[name])))
    made = world.gather(paced.batches)
    assert [sum(of_epoch) for of_epoch in zip(*made, strict=True)] == [UPDATES * PASSES * world.size] * 2
    assert made[1][1] <= UPDATES  # one of each update at most


@mainly_on_torch
def test_half_precision_travels_and_is_averaged(world: World) -> None:
    model, _, dataset = training(world, compression=hvd.Compression.fp16)
    model.fit(dataset, epochs=2, verbose=0)
    world.same(flat(model))
    assert close(weights(model), weights(reference(world, MAKERS["sgd"])), 1e-2)


@mainly_on_torch
def test_each_sample_comes_once_also_where_an_epoch_is_left_early(world: World) -> None:
    x, _ = data(world)
    numbers = np.arange(len(x), dtype="float32").reshape(-1, 1)
    seen: list[float] = []

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    optimizer = wrap(MAKERS["sgd"])
    keras.utils.set_random_seed(1)
    model = Model()
    model.compile(optimizer, "mse", run_eagerly=True)
    dataset = DynamicShardingDataset({"x": x[:, :1], "n": numbers}, optimizer=optimizer, batch_size=BATCH)

    def step(batch: Any) -> None:
        (inputs,) = batch
        seen.extend(inputs["n"].reshape(-1).tolist())
        model.train_on_batch(inputs["x"], inputs["x"])

    for count, batch in enumerate(dataset):
        step(batch)
        if world.rank == 0 and count == 1:
            break
    world.barrier()
    for batch in dataset:  # the rest of the epoch on ranks that have left it; a new one on the others
        step(batch)
        if optimizer.rounds == UPDATES:
            break
    everything = sorted(value for values in world.gather(seen) for value in values)
    assert set(everything) >= set(range(len(x)))


def test_callbacks_validation_and_an_early_stop_in_one_program(world: World, tmp_path: Path) -> None:
    x, y = data(world)
    optimizer = wrap(lambda: keras.optimizers.SGD(0.05, momentum=0.9))
    model = compiled(optimizer)
    dataset = DynamicShardingDataset(x, y, optimizer=optimizer, batch_size=BATCH)
    file = tmp_path / "best.weights.h5"
    calls = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.05 * world.size, warmup_epochs=2, steps_per_epoch=UPDATES),
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0),
    ]
    if world.rank == 0:
        calls.append(keras.callbacks.ModelCheckpoint(str(file), save_weights_only=True))
    history = model.fit(dataset, epochs=6, validation_data=(x, y), callbacks=calls, verbose=0)
    assert len(world.same([round(value, 5) for value in history.history["val_loss"]])) == 2
    world.same(flat(model))
    if world.rank == 0:
        other = make_model()
        other.load_weights(file)
        assert close(weights(other), weights(model))
    # Resume: a new optimizer, the same model, the next epoch.
    again = wrap(lambda: keras.optimizers.SGD(0.05))
    model.compile(again, "mse")
    dataset = DynamicShardingDataset(x, y, optimizer=again, batch_size=BATCH)
    dataset.epoch = 2
    model.fit(dataset, initial_epoch=2, epochs=3, verbose=0)
    assert dataset.epoch == 3
    assert again.rounds == UPDATES
    world.same(flat(model))


def test_a_flush_closes_the_open_update(world: World) -> None:
    model, optimizer, dataset = training(world)
    for x, y in dataset:
        model.train_on_batch(x, y)
        if optimizer.rounds == 1:
            optimizer.flush()
            break
    world.same(flat(model))


@pytest.mark.parametrize("sync", ["work_sharing", "full"])
def test_items_of_a_pydataset_are_micro_batches(world: World, sync: str) -> None:
    x, y = data(world)
    told = []

    class Items(keras.utils.PyDataset):
        @property
        def num_batches(self) -> int:
            return len(x) // BATCH

        def __getitem__(self, index: int) -> Any:
            return x[index * BATCH :][:BATCH], y[index * BATCH :][:BATCH]

        def on_epoch_begin(self) -> None:
            told.append("begin")

        def on_epoch_end(self) -> None:
            told.append("end")

    optimizer = wrap(MAKERS["sgd"], sync=sync)
    model = compiled(optimizer)
    model.fit(DynamicShardingDataset(Items(), optimizer=optimizer), epochs=2, verbose=0)
    assert optimizer.rounds == 2 * UPDATES
    assert told == ["begin", "end"] * 2
    world.same(flat(model))


@pytest.mark.parametrize("sync", ["full", "quorum:1.0"])
@mainly_on_torch
def test_the_same_program_without_work_sharing(world: World, sync: str) -> None:
    optimizer = wrap(MAKERS["sgd"], sync=sync)
    model = compiled(optimizer)
    dataset = DynamicShardingDataset(*data(world), optimizer=optimizer, batch_size=BATCH)
    next(iter(dataset))  # without a step, the batch comes again
    for number, batch in enumerate(dataset):
        model.train_on_batch(*batch)
        if number == 2:  # the rest of the epoch comes in the next loop
            break
    model.fit(dataset, epochs=2, verbose=0)
    optimizer.flush()
    world.same(flat(model))
    assert dataset.epoch == 2
    assert close(weights(model), weights(reference(world, MAKERS["sgd"])))


@pytest.mark.parametrize("sync", ["work_sharing", "full"])
@mainly_on_torch
def test_the_data_follows_a_restored_training(world: World, tmp_path: Path, sync: str) -> None:
    folder = world.same(world.gather(str(tmp_path))[0])

    def fit(epochs: int, stops: bool) -> tuple[keras.Model, DynamicShardingDataset]:
        model, _, dataset = training(world, sync=sync)
        model.build((None, 4))
        backup = keras.callbacks.BackupAndRestore(f"{folder}/{world.rank}", delete_checkpoint=not stops)
        model.fit(dataset, epochs=epochs, callbacks=[backup], verbose=0)
        return model, dataset

    fit(1, stops=True)
    model, dataset = fit(2, stops=False)
    assert dataset.epoch == 2
    assert close(weights(model), weights(reference(world, MAKERS["sgd"])))


@on_tensorflow
def test_a_loop_over_a_dataset_of_tensorflow(world: World) -> None:
    import tensorflow as tf

    optimizer = wrap(MAKERS["sgd"])
    model = make_model()
    dataset = DynamicShardingDataset(*data(world), optimizer=optimizer, batch_size=BATCH)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for _ in range(2):
        dataset.on_epoch_begin()
        for x, y in dataset.get_tf_dataset():
            step(x, y)
        dataset.on_epoch_end()
    world.same(flat(model))
    assert close(weights(model), weights(reference(world, MAKERS["sgd"])))


@on_tensorflow
def test_xla_is_refused(world: World) -> None:
    optimizer = wrap()
    model = compiled(optimizer, jit_compile=True)
    with pytest.raises(ValueError, match="XLA cannot compile collectives"):
        model.fit(DynamicShardingDataset(*data(world), optimizer=optimizer, batch_size=BATCH), verbose=0)


def test_an_overflow_is_skipped_by_all_ranks(world: World) -> None:
    x, y = data(world)
    x[0] = np.inf
    optimizer = wrap(MAKERS["scaled"])
    model = compiled(optimizer)
    dataset = DynamicShardingDataset(x, y, optimizer=optimizer, batch_size=BATCH)
    model.fit(dataset, epochs=1, verbose=0)
    world.same(flat(model))
    assert all(np.isfinite(weight).all() for weight in weights(model))
    assert optimizer.rounds == UPDATES
    assert int(optimizer.iterations) == UPDATES - 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wrap(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)), "not both"),
        (
            lambda: DynamicShardingDataset(np.zeros((9, 1)), optimizer=keras.optimizers.SGD(0.1)),
            "optimizer must be the result of hvd.DistributedOptimizer",
        ),
        (lambda: DynamicShardingDataset(np.zeros((9, 1)), np.zeros(8), optimizer=wrap()), "equally many samples"),
        (lambda: DynamicShardingDataset(np.zeros((2, 1)), optimizer=wrap(), drop_last=True), "nothing is left"),
        (lambda: DynamicShardingDataset(np.zeros((9, 1)), optimizer=wrap(), batch_size=0), "batch_size"),
    ],
)
def test_wrong_arguments(world: World, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@mainly_on_torch
def test_local_variables_are_refused(world: World) -> None:
    optimizer = wrap()
    model = compiled(optimizer)
    optimizer.register_local_var(model.trainable_variables[0])
    x, y = data(world)
    with pytest.raises(ValueError, match="local variables cannot be used"):
        model.train_on_batch(x[:BATCH], y[:BATCH])


class AtEnd(keras.callbacks.Callback):
    """Calls functions at the end of a batch or of an epoch."""

    def __init__(self, *, batch: Callable[[int], Any] = lambda _: None, epoch: Callable[[int], Any] = lambda _: None):
        super().__init__()
        self.batch, self.epoch = batch, epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batch(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch(epoch)


@mainly_on_torch
def test_metrics_of_a_rank_that_has_made_nothing_do_not_count(world: World) -> None:
    model, _, dataset = training(world)
    history = model.fit(dataset, epochs=2, callbacks=[hvd.callbacks.MetricAverageCallback()], verbose=0)
    assert len(world.same([round(loss, 6) for loss in history.history["loss"]])) == 2
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(model)
    logs = {} if world.rank == 0 else {"loss": 3.0, "val_loss": 2.0}
    if world.rank == 1:
        callback.on_train_batch_end(0)
    callback.on_epoch_end(0, logs)
    assert logs == {"loss": 3.0, "val_loss": 2.0}


@mainly_on_torch
def test_replicas_that_began_apart_are_told_and_healed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, dataset = training(world)
    if world.rank == 1:
        model.set_weights([weight + 1.0 for weight in model.get_weights()])
    model.fit(dataset, verbose=0)
    assert ("the parameters of rank(s) 1 are not those of rank 0" in caplog.text) == (world.rank == 0)
    with pytest.raises(RuntimeError, match="had parted"):  # the tests' setting of HOROVOD_PARTIAL_HEAL
        optimizer.flush()
    world.same(flat(model))


@mainly_on_torch
def test_what_is_left_early_is_not_forgotten(world: World) -> None:
    model, optimizer, dataset = training(world)

    def stop(batch: int) -> None:
        model.stop_training = optimizer.rounds >= 1

    model.fit(dataset, epochs=3, callbacks=[AtEnd(batch=stop)], verbose=0)
    assert optimizer._horovod.sharing.work.begun is None  # other ranks may make it
    with pytest.raises(RuntimeError, match="an epoch of another dataset was left early"):
        model.fit(DynamicShardingDataset(*data(world), optimizer=optimizer, batch_size=BATCH), verbose=0)
    model.fit(dataset, verbose=0)
    assert optimizer.rounds == UPDATES
    world.same(flat(model))
    assert dataset.epoch == 1


@mainly_on_torch
def test_a_model_must_be_built_before_it_is_broadcast(world: World) -> None:
    optimizer = wrap(MAKERS["sgd"])
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    with pytest.raises(RuntimeError, match="build the model before fit"):
        callback.on_train_begin()


@mainly_on_torch
def test_the_number_of_passes_is_saved_with_the_model(world: World, tmp_path: Path) -> None:
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, gradient_accumulation_steps=PASSES), sync="work_sharing"
    )
    model = compiled(optimizer)
    file = tmp_path / f"{world.rank}.keras"
    model.fit(DynamicShardingDataset(*data(world), optimizer=optimizer, batch_size=BATCH), verbose=0)
    model.save(file)
    loaded = hvd.load_model(file, sync="work_sharing")
    assert loaded.optimizer._horovod.passes == PASSES
    dataset = DynamicShardingDataset(*data(world), optimizer=loaded.optimizer, batch_size=BATCH)
    loaded.fit(dataset, verbose=0)
    world.same(flat(loaded))


@mainly_on_torch
def test_variables_without_a_gradient_are_left_alone(world: World) -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [keras.layers.Dense(2)(inputs), keras.layers.Dense(1, name="unused")(inputs)])
    optimizer = wrap(lambda: keras.optimizers.AdamW(0.05, weight_decay=0.5))
    model.compile(optimizer, loss=["mse", None])
    x, y = data(world)
    before = model.get_layer("unused").get_weights()[0].copy()
    model.fit(DynamicShardingDataset(x, (y, y[:, :1]), optimizer=optimizer, batch_size=BATCH), verbose=0)
    assert np.array_equal(before, model.get_layer("unused").get_weights()[0])
    world.same(flat(model))


@mainly_on_torch
def test_a_flush_between_a_batch_and_its_step_is_an_error(world: World) -> None:
    model, optimizer, dataset = training(world)
    batches = iter(dataset)
    model.train_on_batch(*next(batches))
    batch = next(batches)
    optimizer.flush()
    with pytest.raises(RuntimeError, match="this batch was loaded for another micro-batch"):
        optimizer._horovod.sharing._complete()
    del batch
