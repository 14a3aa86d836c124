"""Arguments of a wrong kind in every public function of `horovod_partial.torch`; those of optimizers are in `test_conformance_optimizer`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.arguments import NONSENSE, check_nonsense
from harness.matrix import alone
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = alone

NUMBERS: list[Any] = ["1", True, None, [1], float, 1j]
COUNTS: list[Any] = ["1", 1.5, True, None, [1], int]
OPERATION: dict[str, list[Any]] = {
    "tensor": [1, "x", None, [1.0], torch.Tensor],
    "name": NONSENSE["name"],
    "process_set": NONSENSE["process_set"],
}


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


def wrap(**options: Any) -> Any:
    parameters = model().parameters()
    return hvd.DistributedOptimizer(**({"optimizer": torch.optim.SGD(parameters, lr=0.1)} | options))


@pytest.mark.parametrize("policy", ["full", "solo", "group_average:2"])
def test_the_optimizer(world: World, policy: str) -> None:
    for passes in COUNTS:
        check_nonsense(wrap(sync=policy).set_backward_passes_per_step, {"passes": [passes]})
    check_nonsense(wrap(sync=policy).register_round_hook, {"hook": [None, 1, "x", [1]]})


OPERATIONS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "partial_allreduce": (
        {"sync": "solo"},
        {"prescale_factor": NUMBERS, "postscale_factor": NUMBERS, "op": NONSENSE["op"], "sync": NONSENSE["sync"]},
    ),
    "average": (
        {"policy": hvd.WeightedAverage(1, 0.5), "steps": 1},
        {"policy": [1, None, "solo", hvd.Solo(), hvd.GroupAverage], "steps": [*COUNTS, -1]},
    ),
}


FORMS = [("partial_allreduce", suffix) for suffix in ("", "_", "_async", "_async_")]


@pytest.mark.parametrize(("kind", "suffix"), [*FORMS, ("average", ""), ("average", "_async")])
def test_operations(world: World, kind: str, suffix: str) -> None:
    needed, nonsense = OPERATIONS[kind]
    call = getattr(hvd, kind + suffix)
    options = {"tensor": torch.ones(2), "name": world.name(), **needed}
    check_nonsense(lambda **wrong: call(**(options | wrong)), OPERATION | nonsense)
    assert world.name() not in hvd.partial_stats()


def with_optimizer(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **wrong: call(**({"path": "unused", "model": model(), "optimizer": wrap(sync="solo")} | wrong))


def follow_rounds(**wrong: Any) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(wrap(sync="solo"), 1)
    hvd.follow_rounds(**({"scheduler": schedule} | wrong))


NO_MODEL = [None, 1, "x", torch.nn.Linear]
NO_OPTIMIZER = [1, "x", torch.optim.SGD]
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, list[Any]]]] = {
    "follow_rounds": (follow_rounds, {"scheduler": [None, 1, "x", torch.optim.lr_scheduler.StepLR], "every": COUNTS}),
    "save_checkpoint": (with_optimizer(hvd.save_checkpoint), {"path": [None, 1, [1]], "model": NO_MODEL}),
    "assert_replicas_equal": (
        lambda **wrong: hvd.assert_replicas_equal(**({"model": model()} | wrong)),
        {"model": NO_MODEL, "optimizer": NO_OPTIMIZER, "process_set": NONSENSE["process_set"]},
    ),
    **{name: (getattr(hvd, name), {"process_set": NONSENSE["process_set"]}) for name in ("flush", "partial_stats")},
    **{
        name: (getattr(hvd, name), {"handle": [None, "x", 1.5, True]}) for name in ("synchronize", "poll", "round_info")
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(world: World, name: str) -> None:
    check_nonsense(*FUNCTIONS[name])
