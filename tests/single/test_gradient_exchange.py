"""How an optimizer of Keras and a tape combine the gradients of a step, with doubles of the framework and its buckets."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import Ranks

import horovod_partial.torch  # noqa: F401 (loads Horovod, which the package needs)
from horovod_partial.exchange.gradients import GradientExchange, Kind, Planned, Wire


class Buckets:
    """One bucket. `ended` has the gradients of each round that has ended here and was not taken."""

    def __init__(self, variables: list[Any], apply: Callable[..., None] | None, ended: list[list[float]]) -> None:
        self.family = SimpleNamespace(names=["bucket"])
        self.sent: list[list[float]] = []
        self._variables, self._apply, self._ended = variables, apply, ended

    def arrive(self, wires: Sequence[Wire]) -> None:
        self.sent.append([wire.tensor for wire in wires])

    def sums(self, arrived: None) -> list[float]:
        return [sum(of_variable) for of_variable in zip(*self._ended, strict=True)]

    def take_first(self, arrived: None, apply: Callable[..., None]) -> None:
        if self._ended:
            apply(self._ended.pop(0), self._variables, 0.5)

    def take_all(self, arrived: None) -> None:
        assert self._apply is not None
        while self._ended:
            self._apply(self._ended.pop(0), self._variables, 0.5)


class Framework:
    """Gradients are numbers. The job has 8 ranks, of which an exchange has 4."""

    def __init__(self) -> None:
        self.runtime = SimpleNamespace(
            size=lambda: 8,
            size_of=lambda process_set: process_set.size(),
            is_alone=lambda process_set: False,
            take_part_in_flushes=lambda rounds: None,
        )
        self.ended: list[list[float]] = []
        self.made: list[Buckets] = []

    def number_of(self, variable: Any, process_set: Any) -> int:
        return variable.number

    def divided(self, gradient: float, divisor: int) -> float:
        return gradient / divisor

    def wire(self, gradient: float, variable: Any, options: Any) -> Wire:
        return Wire(gradient, Kind("float32", 4))

    def buckets(self, planned: list[Planned], variables: list[Any], options: Any, apply: Any) -> Buckets:
        self.made.append(Buckets(variables, apply, self.ended))
        return self.made[-1]


def exchange_of(framework: Framework, local: list[Any], *, scaled: bool = True) -> GradientExchange:
    ranks = Ranks(4)
    options: Any = SimpleNamespace(process_set=ranks, plan=lambda keys, *_, **__: [list(range(len(keys)))])
    arguments = {"process_set": ranks, "scale_local_gradients": scaled}
    return GradientExchange(framework, "name", arguments, options, local)  # type: ignore[arg-type]


@pytest.fixture
def variables() -> list[Any]:
    return [SimpleNamespace(number=number, name=f"weight{number}:0", shape=(1,)) for number in range(3)]


@pytest.mark.parametrize(("scaled", "own"), [(True, 2.0), (False, 8.0)])
def test_what_stays_here_is_divided_by_the_ranks_of_the_process_set(
    variables: list[Any], scaled: bool, own: float
) -> None:
    framework = Framework()
    framework.ended = [[10.0, 30.0], [1.0, 3.0]]
    exchange = exchange_of(framework, [], scaled=scaled)
    exchange.register_local(variables[1])
    assert exchange.reduce([1.0, 8.0, 2.0], variables) == [11.0, own, 33.0]
    (buckets,) = framework.made
    assert buckets.sent == [[1.0, 2.0]]


def test_what_stays_here_is_applied_once_however_many_rounds_a_step_applies(variables: list[Any]) -> None:
    framework = Framework()
    exchange = exchange_of(framework, variables[1:2])
    applied = []

    def apply(gradients: list[Any], of: list[Any], steps: float) -> None:
        applied.append(({each.number: gradient for each, gradient in zip(of, gradients, strict=True)}, steps))

    framework.ended += [[10.0, 30.0], [20.0, 60.0], [1.0, 3.0]]  # two that were missed, and that of this step
    exchange.apply_combined([1.0, 8.0, 2.0], variables, apply)
    assert applied == [({0: 10.0, 1: 2.0, 2: 30.0}, 0.5), ({0: 20.0, 2: 60.0}, 0.5), ({0: 1.0, 2: 3.0}, 0.5)]
    applied.clear()
    exchange.apply_combined([None, 8.0, None], variables, apply)
    assert applied == [({0: None, 1: 2.0, 2: None}, 1.0)], "nothing travels"
