"""Merged gradients: a network whose cost is known, and trainings with it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.trainers import EVERYBODY, Trainer, Training
from harness.world import World
from horovod_partial.merging import MessageCost, planner

ALL = ["full", "solo", "majority", EVERYBODY]
WARMUP = 2
SWITCH = WARMUP + 1  # steps until the plan is there
OF_PLANS = ("plan", "rule", "replan_every")


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> MessageCost:
    """A network that is never busy: probes travel, but their times do not count."""
    cost = MessageCost(1e-4, 1e-9)
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: cost))
    monkeypatch.setattr(planner, "_PROBES", 1)
    return cost


def merged(trainer: Trainer, world: World, sync: Any = "full", *training: Any, **options: Any) -> Training:
    """A training whose gradients are merged; its options are of plans, too."""
    of_plans = {name: options.pop(name) for name in OF_PLANS if name in options}
    options["merging"] = trainer.hvd.MergedGradients(**{"warmup_steps": WARMUP, "replan_every": None, **of_plans})
    return trainer.training(world, sync, *training, **options)
