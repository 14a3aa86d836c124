"""Every recipe of the cookbook ends with one model, under each policy, with one rank that is slow."""

import importlib
import sys
import time
from pathlib import Path

import pytest
import torch
from harness.matrix import OVER_MPI
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = pytest.mark.launch(**OVER_MPI, ranks=(2,))  # one of the recipes compiles

COOKBOOK = Path(__file__).resolve().parents[2] / "examples" / "torch" / "cookbook"
RECIPES = sorted(path.stem for path in COOKBOOK.glob("*.py") if path.stem != "data")
POLICIES = ("full", "majority", "solo")
OTHER_POLICIES = {"work_sharing": ("work_sharing",), "two_kinds": (*POLICIES, "work_sharing")}
NEEDS = {"accelerate_loop": "accelerate", "lightning_loop": "lightning"}  # beside what the other recipes need


CASES = [(recipe, policy) for recipe in RECIPES for policy in OTHER_POLICIES.get(recipe, POLICIES)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("recipe", "policy"), CASES)
def test_recipe(world: World, monkeypatch: pytest.MonkeyPatch, recipe: str, policy: str) -> None:
    if package := NEEDS.get(recipe):
        reason = f"{recipe}.py needs {package}, which is not installed"
        pytest.importorskip(package, reason=reason)
    monkeypatch.setattr(sys, "path", [str(COOKBOOK), *sys.path])
    for name in (recipe, "data"):  # the cookbook of the other framework has modules of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(recipe)
    slow = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: time.sleep(0.002 * (world.rank == 1)))
    try:
        model, optimizer = module.train(policy)
    finally:
        slow.remove()
    hvd.assert_replicas_equal(model, optimizer)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_recipes_are_short(world: World) -> None:
    assert len(RECIPES) >= 12
    assert all(len((COOKBOOK / f"{recipe}.py").read_text().splitlines()) <= 60 for recipe in RECIPES)
