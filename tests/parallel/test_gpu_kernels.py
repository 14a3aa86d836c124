"""TensorFlow's operations on a GPU, or the double of one (`make test-gpu-double`): where they run, and what is refused.

What they compute there is tested by the other files, which do not say where.
"""

import re
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.matrix import WITH_TWO_RANKS, alone
from harness.world import World

import horovod_partial.tensorflow as hvd
from horovod_partial.tensorflow import graph

pytestmark = pytest.mark.launch(**WITH_TWO_RANKS, framework="tensorflow")

EVERYBODY = "quorum:1.0"
REFUSAL = "partial collectives of TensorFlow's tensors have not been tried on a GPU"

needs_gpu = pytest.mark.skipif(
    not (graph.library.horovod_partial_has_gpu_kernels() and tf.config.list_physical_devices("GPU")),
    reason="needs a GPU, or the double of one, and kernels for it",
)
modes = pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])


def device_of(tensor: tf.Tensor) -> str:
    return str(tensor.device).rpartition("device:")[2]


@alone
@pytest.mark.skipif(graph.library.horovod_partial_has_gpu_kernels(), reason="there are kernels for GPUs")
def test_without_kernels_for_gpus_everything_is_on_the_host(world: World) -> None:
    with tf.device("/GPU:0"):
        result = hvd.partial_allreduce(tf.ones([3]), name=world.name(), sync="solo")
    assert device_of(result) == "CPU:0"


@alone
@needs_gpu
@modes
def test_gpus_are_refused_until_they_have_run(world: World, monkeypatch: pytest.MonkeyPatch, in_graph: bool) -> None:
    def reduce() -> tf.Tensor:
        return hvd.partial_allreduce(tf.ones([3]), name=world.name(), op=hvd.Sum, sync="solo")

    monkeypatch.setattr(graph, "gpu_refusal", lambda *_, **__: REFUSAL)
    error = tf.errors.InvalidArgumentError if in_graph else ValueError
    with pytest.raises(error, match=re.escape(f"rank 0: {world.name()}: {REFUSAL}")):
        (tf.function(reduce) if in_graph else reduce)()
    with tf.device("/CPU:0"):
        assert reduce().numpy().tolist() == [1.0] * 3


@needs_gpu
@modes
@pytest.mark.parametrize("scope", [None, "/CPU:0", "/GPU:0"])
def test_tensors_lie_where_tensorflow_places_them(world: World, scope: str | None, in_graph: bool) -> None:
    def reduce(tensor: tf.Tensor) -> tuple[list[tf.Tensor], graph.RoundInfo]:
        with tf.device(scope):
            tensors = [tensor, 2 * tensor, tf.reshape(tensor, [2, 2])[:1]]
            return hvd.partial_allreduce(tensors, name=world.name(), op=hvd.Sum, sync=EVERYBODY, return_info=True)

    call = tf.function(reduce) if in_graph else reduce
    for step in range(20):
        results, info = call(tf.constant([float(world.rank + step), 1.0, 2.0, 3.0]))
        total = sum(rank + step for rank in world.ranks)
        ones = world.size
        assert [one.numpy().tolist() for one in results] == [
            [total, ones, 2 * ones, 3 * ones],
            [2 * total, 2 * ones, 4 * ones, 6 * ones],
            [[total, ones]],
        ]
        assert info.members.numpy().tolist() == list(world.ranks)
        if not in_graph:  # what a function returns is where its caller is
            assert {device_of(one) for one in results} == {"CPU:0" if scope == "/CPU:0" else "GPU:0"}


def train(world: World, steps: int, scope: str | None, **options: Any) -> np.ndarray:
    """The weights of a model whose variables are on the host: the double has no kernels for them. `scope` is the optimizer's."""
    keras.utils.set_random_seed(1)
    with tf.device("/CPU:0"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), **options)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.device("/CPU:0"), tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        with tf.device("/CPU:0"):
            gradients = tape.gradient(loss, model.trainable_variables)
        with tf.device(scope):
            optimizer.apply(gradients, model.trainable_variables)

    random = np.random.default_rng(world.rank)
    for number in range(steps):
        if number % world.size == world.rank:
            time.sleep(0.01)
        step(tf.constant(random.normal(size=(6, 4)).astype("float32")))
    optimizer.flush()
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


@needs_gpu
@pytest.mark.parametrize("scope", [None, "/CPU:0"])
def test_late_ranks_get_what_they_have_missed(world: World, scope: str | None) -> None:
    """Rounds are taken where their buckets lie, also outside of the scope that the training was in."""
    weights = train(world, 20, scope, sync="solo")
    assert np.isfinite(weights).all()
    assert len(set(world.gather(weights.tobytes().hex()))) == 1


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"groups": 4}], ids=["one bucket", "a bucket for each"])
def test_the_same_weights_as_on_the_host(world: World, options: dict[str, Any]) -> None:
    weights = train(world, 10, None, sync=EVERYBODY, **options)
    np.testing.assert_allclose(weights, train(world, 10, "/CPU:0", sync=EVERYBODY), rtol=1e-5)
    assert len(set(world.gather(weights.tobytes().hex()))) == 1
