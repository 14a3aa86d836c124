"""As `test_cookbook`, for Keras on both backends."""

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.keras_training import dtype_policy
from harness.matrix import keras_front_end, keras_on_torch
from harness.world import World

import horovod_partial.keras as hvd

COOKBOOK = Path(__file__).resolve().parents[2] / "examples" / "keras" / "cookbook"
RECIPES = sorted(path.stem for path in COOKBOOK.glob("*.py") if path.stem != "data")

policies = pytest.mark.parametrize("policy", ["full", "majority", "solo"])
recipes = pytest.mark.parametrize("recipe", RECIPES)


def check(world: World, monkeypatch: pytest.MonkeyPatch, recipe: str, policy: str) -> None:
    def sleep(*_: Any, **__: Any) -> None:
        time.sleep(0.002 * (world.rank == 1))

    def slowed(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            sleep()
            yield batch

    monkeypatch.setattr(sys, "path", [str(COOKBOOK), *sys.path])
    for name in (recipe, "data"):  # the cookbook of the other framework has modules of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(recipe)
    monkeypatch.setattr(keras.callbacks.Callback, "on_train_batch_begin", sleep)  # in `fit`
    if hasattr(module, "batches"):  # in a loop
        monkeypatch.setattr(module, "batches", lambda number, batches=module.batches: slowed(batches(number)))
    with dtype_policy(keras.config.dtype_policy().name):
        model, optimizer = module.train(policy)
    hvd.assert_replicas_equal(model, optimizer)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@keras_front_end
@pytest.mark.one_in(16)
@policies
@recipes
def test_recipe_on_tensorflow(world: World, monkeypatch: pytest.MonkeyPatch, recipe: str, policy: str) -> None:
    check(world, monkeypatch, recipe, policy)


@keras_on_torch
@pytest.mark.one_in(2)
@policies
@recipes
def test_recipe_on_torch(world: World, monkeypatch: pytest.MonkeyPatch, recipe: str, policy: str) -> None:
    check(world, monkeypatch, recipe, policy)


def test_recipes_are_short() -> None:
    assert len(RECIPES) >= 12
    assert all(len((COOKBOOK / f"{recipe}.py").read_text().splitlines()) <= 60 for recipe in RECIPES)
