"""States of elastic jobs, and what follows where ranks come or fail, with a double of Horovod's functions."""

from types import SimpleNamespace
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

import horovod_partial.torch  # noqa: F401 (loads Horovod, which the package needs)
from horovod_partial.exchange import elastic


class Variable:
    def __init__(self, value: float) -> None:
        self.value = value

    def numpy(self) -> float:
        return self.value

    def assign(self, value: float) -> None:
        self.value = value


def broadcast(variables: list[Variable], root_rank: int) -> None:
    """Rank 0 has tens."""
    for number, variable in enumerate(variables):
        variable.assign(10.0 * number + root_rank)


FUNCTIONS = broadcast, lambda value, **_: value, lambda: 1


class State(elastic.VariablesState):
    functions = FUNCTIONS


class KerasState(elastic.KerasState):
    functions = FUNCTIONS


def test_a_state_goes_back_to_what_was_saved_or_came_from_rank_0() -> None:
    variables = [Variable(1.0), Variable(2.0)]
    state = State(variables, epoch=3)

    def now() -> list[float]:
        return [*(variable.value for variable in variables), state.epoch]

    def change() -> None:
        for variable in variables:
            variable.value += 100.0
        state.epoch += 1

    change()
    state.restore()
    assert now() == [1.0, 2.0, 3], "as it was made"
    change()
    state.save()
    change()
    state.restore()
    assert now() == [101.0, 102.0, 4]
    state.sync()
    change()
    state.restore()
    assert now() == [0.0, 10.0, 4]


def test_a_state_of_keras_has_the_model_and_all_of_the_optimizer() -> None:
    weights, of_optimizer, ahead = [Variable(1.0)], [Variable(2.0)], Variable(3.0)
    optimizer = SimpleNamespace(built=True, variables=of_optimizer, all_variables=[*of_optimizer, ahead])
    model = SimpleNamespace(built=True, weights=weights, optimizer=optimizer, train_function="of 2 ranks")
    state = KerasState(model)
    assert state.variables == [*weights, *of_optimizer, ahead]
    state.reset()
    assert model.train_function is None
    bare = SimpleNamespace(built=True, variables=of_optimizer)  # one of Keras's own
    assert KerasState(model, bare).variables == [*weights, *of_optimizer]


@pytest.mark.parametrize(
    ("error", "failed"), [(HostsUpdatedInterrupt(skip_sync=True), False), (HorovodInternalError(), True)]
)
def test_after_a_restart_all_ranks_get_the_state_of_rank_0(error: Exception, failed: bool) -> None:
    """Also where ranks have only gone: those that stay may have missed rounds."""
    done: list[str] = []
    errors = [error]
    runtime: Any = SimpleNamespace(failed=False, restart=lambda: done.append("restart"))

    def train(state: State, steps: int) -> int:
        done.append("train")
        if errors:
            raise errors.pop()
        return steps

    class Told(State):
        def sync(self) -> None:
            done.append("sync")

        def restore(self) -> None:
            done.append("restore")

    assert elastic.run(train, runtime)(Told([Variable(0.0)]), 5) == 5
    assert done == ["sync", "train", *(["restore"] if failed else []), "restart", "sync", "train"]
    assert runtime.failed == failed
