"""What is done with each round besides the optimizer's step: clipping, hooks and schedules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import horovod_partial.torch as hvd
from horovod_partial.torch.round_steps import RoundSteps


def sgd(*gradients: float) -> torch.optim.SGD:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor([gradient])
    return torch.optim.SGD(parameters, lr=1.0)


def gradients_of(optimizer: torch.optim.SGD) -> list[float]:
    return [parameter.grad.item() for parameter in optimizer.param_groups[0]["params"]]


def double(gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient.mul_(2.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((None, None, None), [3.0, 4.0]),
        ((1.0, None, None), [0.6, 0.8]),
        ((None, 3.5, None), [3.0, 3.5]),
        ((None, None, double), [6.0, 8.0]),
        ((5.0, 3.5, double), [3.0, 3.5]),  # in this order: transformed, the norm clipped, then each element
    ],
)
def test_gradients_are_transformed_and_clipped(options: tuple[Any, Any, Any], expected: list[float]) -> None:
    optimizer = sgd(3.0, 4.0)
    steps = RoundSteps(*options)
    steps.before(optimizer, 0.5)
    assert gradients_of(optimizer) == pytest.approx(expected)
    assert steps.steps == 0.5


def test_hooks_are_called_in_order_until_they_are_removed() -> None:
    steps, called = RoundSteps(None, None, None), []
    handles = [steps.register(lambda _, name=name: called.append(name)) for name in "abc"]
    handles[1].remove()
    steps.after(sgd(1.0))
    assert called == ["a", "c"]


class Wrapped(torch.optim.SGD):
    """Like a `DistributedOptimizer`, whose rounds have parts of a step."""

    is_horovod_partial = True

    def register_round_hook(self, hook: Callable[[Any], None], state: Any) -> None:
        self.hook = hook

    def applied(self, steps: float) -> None:
        self.steps_in_round = steps
        self.step()
        self.hook(self)


@pytest.mark.parametrize("every", [1, 2])
def test_a_schedule_follows_the_steps_of_rounds(every: int) -> None:
    optimizer = Wrapped([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = hvd.follow_rounds(StepLR(optimizer, 1, 0.5), every)
    rates = []
    for part in (*[0.1] * 10, 0.25, 0.75, 0.5, 1.5, 1.0):
        optimizer.applied(part)
        schedule.step()  # as an unedited loop does
        rates.append(schedule.get_last_lr()[0])
    exponents = {1: [*[0] * 9, 1, 1, 2, 2, 4, 5], 2: [*[0] * 10, 0, 1, 1, 2, 2]}[every]
    assert rates == [0.5**exponent for exponent in exponents]
