"""`hvd.SlowMomentum` on the ranks of a job that is emulated in this process."""

from __future__ import annotations

import pytest
import torch

from horovod_partial.policies import GroupAverage, SlowMomentum, WeightedAverage
from horovod_partial.torch.slow_momentum import SlowMomentumState

RANKS = 4


class Job:
    """Ranks that average, each with a state of its own."""

    def __init__(self, policy: SlowMomentum) -> None:
        self.states = [SlowMomentumState(policy) for _ in range(RANKS)]
        self.generator = torch.Generator().manual_seed(1)
        self.models = [torch.zeros(5, dtype=torch.float64) for _ in range(RANKS)]

    def train(self) -> torch.Tensor:
        """A step on each rank. Returns the plain mean after it."""
        for model in self.models:
            model.add_(torch.randn(5, dtype=torch.float64, generator=self.generator))
        return torch.stack(self.models).mean(0)

    def average(self, ranks: range = range(RANKS)) -> None:
        """Some ranks average, while the others are out of training."""
        for rank in ranks:
            self.states[rank].contribute(self.models[rank])
        mean = torch.stack([self.models[rank] for rank in ranks]).mean(0)
        for rank in ranks:
            self.models[rank].copy_(mean)
            self.states[rank].take(mean)


@pytest.mark.parametrize(("beta", "alpha"), [(0.5, 1.0), (0.7, 0.5), (0.0, 2.0)])
def test_the_recursion(beta: float, alpha: float) -> None:
    job = Job(SlowMomentum(beta, alpha))
    anchor = job.train()
    job.average()
    momentum = torch.zeros_like(anchor)
    for _ in range(5):
        plain = job.train()
        job.average()
        momentum = beta * momentum + anchor - plain
        anchor = anchor - alpha * momentum
        for model in job.models:
            torch.testing.assert_close(model, anchor)


def test_neither_momentum_nor_rate_is_the_plain_average() -> None:
    job = Job(SlowMomentum(0.0))
    for _ in range(4):
        plain = job.train()
        job.average()
        torch.testing.assert_close(job.models[0], plain)


def test_a_rank_that_was_away_finds_the_momentum_of_the_others() -> None:
    """After it has taken part in two averages; all models are equal after the first."""
    job = Job(SlowMomentum(0.5, 0.8))
    for ranks in (range(RANKS), range(RANKS), range(2), range(RANKS), range(RANKS)):
        job.train()
        job.average(ranks)
    states = [state.state_dict() for state in job.states]
    for state in states[1:]:
        assert state is not None
        assert states[0] is not None
        torch.testing.assert_close(state["anchor"], states[0]["anchor"])
        torch.testing.assert_close(state["momentum"], states[0]["momentum"])


def test_state() -> None:
    job = Job(SlowMomentum(0.5))
    assert job.states[0].state_dict() is None
    for _ in range(3):
        job.train()
        job.average()
    other = SlowMomentumState(SlowMomentum(0.5))
    other.load_state_dict(job.states[0].state_dict())
    one, same = (torch.ones(5, dtype=torch.float64) for _ in range(2))
    job.states[0].contribute(one)
    other.contribute(same)
    assert torch.equal(one, same)
    other.load_state_dict(None)
    other.contribute(same)
    assert torch.equal(one, same)  # without an average before there is no momentum


def test_wrong_arguments() -> None:
    for beta in (-0.1, 1.0, "0.5", True, None):
        with pytest.raises(ValueError, match="beta must be a number, 0 or more and below 1"):
            SlowMomentum(beta)  # type: ignore[arg-type]
    for alpha in (0.0, -1.0, float("inf"), "1"):
        with pytest.raises(ValueError, match="alpha must be a number above 0"):
            SlowMomentum(0.5, alpha)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slow_momentum must be hvd.SlowMomentum\(beta\)"):
        WeightedAverage(8, 0.9, slow_momentum=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a period"):
        GroupAverage(2, period=None, slow_momentum=SlowMomentum(0.5))
