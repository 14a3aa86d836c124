"""As `test_one_model`, for Keras: here on TensorFlow, and `test_one_model_keras_torch` takes these tests too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness.designs import pairwise
from harness.keras_training import MAKERS, MAKERS_OF_MAKERS, called, make_model, stepper
from harness.matrix import keras_front_end, long_cases
from harness.trainers import batch
from harness.world import World, paced

import horovod_partial.keras as hvd

# Graphs take long to trace.
pytestmark = [keras_front_end, pytest.mark.one_in(10)]

LONG = pytest.mark.full_matrix

# Of each class, as one of MAKERS makes it. Some exist in newer versions of Keras only.
CLASSES = sorted({type(make()).__name__: name for name, make in MAKERS.items()}.items())
AXES = {
    "policy": ["solo", "majority", "quorum:1.0"],
    "update": [{}, {"clipnorm": 0.05}, {"global_clipnorm": 0.05}, {"clipvalue": 0.01}, {"use_ema": True}],
    "precision": ["float32", "mixed_float16", "mixed_bfloat16"],
    "schedule": [False, True],
    "delays": ["random", "one is slow"],
    "ends_early": [False, True],
    "buckets": [1, 4],
    "passes": [1, 2],
    "graph": [False, True],
}
SEED = 14


def cases() -> list[Any]:
    words = {name: list(map(str, values)) for name, values in AXES.items()}
    drawn = pairwise(words, len(CLASSES), SEED)
    named = zip(itertools.cycle(CLASSES), drawn, strict=False)
    values = {name: dict(zip(words[name], AXES[name], strict=True)) for name in AXES}

    def values_of(case: dict[str, str]) -> dict[str, Any]:
        return {axis: values[axis][word] for axis, word in case.items()}

    return [pytest.param(made, values_of(of), id="-".join([kind, *of.values()])) for (kind, made), of in named]


def made(maker: str, case: dict[str, Any]) -> Any:
    optimizer = MAKERS[maker]()
    if maker in MAKERS_OF_MAKERS:
        return optimizer
    config = optimizer.get_config() | case["update"]
    if case["update"].get("use_ema"):
        config["ema_momentum"] = 0.9
    if case["schedule"]:
        rate = keras.optimizers.schedules.CosineDecay(0.01, 40)
        config["learning_rate"] = keras.optimizers.schedules.serialize(rate)
    if case["passes"] > 1 and case["precision"] != "mixed_float16" and not case["update"].get("use_ema"):
        config["gradient_accumulation_steps"] = case["passes"]
    return type(optimizer).from_config(config)


@pytest.mark.parametrize(("maker", "case"), cases())
def test_replicas_are_equal(world: World, maker: str, case: dict[str, Any]) -> None:
    print(f"pairwise design from seed {SEED}")
    optimizer = made(maker, case)
    if case["precision"] == "mixed_float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # It overflows at first, and whenever it has grown.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**40, dynamic_growth_steps=5)
    model = make_model(dtype=case["precision"])
    optimizer = hvd.DistributedOptimizer(optimizer, sync=case["policy"], groups=case["buckets"])
    graph = case["graph"] and keras.backend.backend() == "tensorflow"
    step = stepper(model, optimizer, graph=graph)
    for number in paced(world, case["delays"], ends_early=case["ends_early"]):
        step(*batch(world.rank, number))
    optimizer.flush()
    hvd.assert_replicas_equal(model, optimizer)
    assert optimizer.flushed()
    world.same(optimizer.rounds)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": keras.optimizers.Adam,
    "loss scale": lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate), initial_scale=64.0),
    "chosen by variable": lambda rate: keras.optimizers.MultiOptimizer(lambda _: keras.optimizers.SGD(rate)),
    "accumulates": lambda rate: keras.optimizers.SGD(rate, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["solo", *long_cases("majority", "full", "group_average")])
def test_a_schedule_ends_with_the_steps(world: World, policy: str, kind: str) -> None:
    """Ranks that are late make more rounds than steps; a schedule of so many steps takes them all the same."""
    rate = keras.optimizers.schedules.CosineDecay(0.01, 20)
    optimizer = hvd.DistributedOptimizer(KINDS[kind](rate), sync=policy)
    model = make_model()
    step = stepper(model, optimizer, graph=policy in ("solo", "full") and keras.backend.backend() == "tensorflow")
    for number in paced(world, "one is slow", ends_early=False):
        step(*batch(world.rank, number))
    optimizer.flush()
    own = optimizer.optimizers[0] if kind == "chosen by variable" else optimizer
    assert int(own.iterations) >= (12 if kind != "accumulates" else 6)
    assert float(own.learning_rate) == float(rate(12))
    hvd.assert_replicas_equal(model, None if policy == "group_average" else optimizer)


@pytest.mark.parametrize("graph", [True, pytest.param(False, marks=LONG)], ids=["graph", "eager"])
def test_each_round_has_the_rate_of_its_step(world: World, graph: bool) -> None:
    """Of a rate that is zero from some step on, as many steps are taken as before, and what the last round has beyond."""
    weights = [keras.Variable(np.zeros(1, np.float32)) for _ in range(2)]
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([4], [1.0, 0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), sync="solo", groups=2)
    optimizer.build(weights)
    ones = keras.ops.convert_to_tensor(np.ones(1, np.float32))
    step = called(lambda: optimizer.apply([ones, ones], weights), graph and keras.backend.backend() == "tensorflow")
    for _ in paced(world, "one is slow", ends_early=False):
        step()
    optimizer.flush()
    for weight in weights:
        assert 5 - 1e-5 <= -float(weight[0]) < 12 - 1e-5
        world.same(float(weight[0]))
