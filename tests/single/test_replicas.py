"""Which replicas differ after a flush, and which rank's values all ranks get."""

import pytest
import torch

import horovod_partial.torch  # noqa: F401 (loads Horovod, which the extension needs)
from horovod_partial.runtime.healing import Facts, digest, parted, source_of
from horovod_partial.torch.replica import ReplicaState


def facts(values: int = 1, *, lost: int = 0, rounds: int = 5, numbers: int = 1, name: int = 7) -> Facts:
    return Facts(name, rounds, lost, values, numbers, joined=0)


@pytest.mark.parametrize(
    ("of_ranks", "not_finite", "source"),
    [
        ([facts(1), facts(2), facts(2)], (), 1),  # most ranks have the values of rank 1
        ([facts(1), facts(2)], (), 0),
        ([facts(1, lost=1), facts(2, lost=3), facts(3), facts(2, lost=3)], (), 2),  # it lost the fewest rounds
        ([facts(1), facts(1), facts(2, lost=1)], (0, 1), 2),  # the values of the others are not finite
        ([facts(1), facts(2), facts(2)], (0, 1, 2), 1),  # nobody has better values
        ([facts(1, numbers=1), facts(1, numbers=2), facts(1, numbers=2)], (), 0),  # only learning rates differ
        ([facts(1, lost=2), facts(2, numbers=3), facts(2, numbers=4), facts(3), facts(3)], (), 3),
    ],
)
def test_all_ranks_get_the_values_of_the_best_replica(
    of_ranks: list[Facts], not_finite: tuple[int, ...], source: int
) -> None:
    members = dict(enumerate(of_ranks))
    assert source_of(members, {rank: rank not in not_finite for rank in members}) == source


def test_replicas_are_compared_after_equally_many_rounds() -> None:
    alike = facts(), facts(2, name=8)
    assert parted({0: alike, 1: alike}) == {}
    behind = facts(3, rounds=4)
    assert parted({0: [facts()], 1: [behind]}) == {}, "the rank has not taken the last round"
    assert parted({0: [facts()], 1: [facts(3)], 2: [behind]}) == {7: {0: facts(), 1: facts(3)}}
    assert parted({0: alike, 1: [facts(), facts(2, name=8, numbers=2)]}) == {
        8: {0: alike[1], 1: facts(2, name=8, numbers=2)}
    }


def replica(seed: int, rate: float) -> tuple[torch.nn.Linear, torch.optim.SGD, ReplicaState]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer, ReplicaState(optimizer, {of: name for name, of in model.named_parameters()}, ())


def test_a_replica_gets_the_parameters_the_state_and_the_numbers_of_another() -> None:
    (source, of_source, first), (healed, of_healed, second) = replica(0, 0.1), replica(1, 0.2)
    of_source.state[source.bias]["momentum_buffer"].fill_(2.0)
    of_healed.state[healed.weight]["more"] = 1
    far = (source.weight - healed.weight).abs().max().item()
    assert digest(first.arrays()) != digest(second.arrays())
    apart = second.write(first.arrays(), first.numbers())
    assert digest(first.arrays()) == digest(second.arrays())
    assert second.numbers() == first.numbers()
    assert torch.equal(healed.weight, source.weight)
    assert of_healed.state[healed.bias]["momentum_buffer"].tolist() == [2.0]
    assert of_healed.param_groups[0]["lr"] == 0.1
    assert "more" not in of_healed.state[healed.weight]
    assert apart["parameter", "weight", ""] == pytest.approx(far)
    assert apart["state", "bias", "momentum_buffer"] == 1.0


def test_one_element_makes_a_replica_not_finite() -> None:
    model, _, state = replica(0, 0.1)
    assert state.is_finite()
    with torch.no_grad():
        model.weight[0, 1] = float("nan")
    assert not state.is_finite()
