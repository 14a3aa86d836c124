"""As `test_one_model`, for Keras: here on TensorFlow, and `test_one_model_keras_torch` takes these tests too."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from harness.designs import pairwise
from harness.keras_training import MAKERS, MAKERS_OF_MAKERS, batch, make_model, stepper
from harness.matrix import keras_front_end
from harness.world import World, paced

import horovod_partial.keras as hvd

# Graphs take long to trace.
pytestmark = [keras_front_end, pytest.mark.one_in(5)]

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
    return [
        pytest.param(
            maker, {axis: values[axis][word] for axis, word in case.items()}, id=f"{kind}-{'-'.join(case.values())}"
        )
        for (kind, maker), case in named
    ]


def test_every_optimizer_is_in_the_list(world: World) -> None:
    kinds = {name for name, kind in vars(keras.optimizers).items() if isinstance(kind, type) and name != "Optimizer"}
    abstract = {"Optimizer", "legacy", "TFOptimizer"}
    optimizers = {
        name for name in kinds - abstract if issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)
    }
    assert {kind for kind, _ in CLASSES} >= optimizers - {"LossScaleOptimizer", "MultiOptimizer"}


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


@pytest.mark.parametrize(("policy", "is_told"), [("solo", True), ("full", False), ("group_average", False)])
def test_a_schedule_that_ends_early_is_told(world: World, policy: str, is_told: bool) -> None:
    rate = keras.optimizers.schedules.CosineDecay(0.01, 40)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), sync=policy)
    step = stepper(make_model(), optimizer, graph=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            step(*batch(world.rank, number))
    optimizer.flush()
    told = [str(warning.message) for warning in caught if "schedule counts rounds" in str(warning.message)]
    assert len(told) == is_told
