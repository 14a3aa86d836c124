"""SGP, stochastic gradient push (Assran et al., ICML 2019): push-sum along a directed exponential graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import horovod_partial.torch as hvd
from baselines.baseline import Baseline
from baselines.pairs import Inbox, Outbox, ranks_of_sets, set_with


class PushSum(Baseline):
    """A rank waits for messages that were sent to it, and never for the ranks that it sends to.

    In the order of the paper's Algorithm 1: a rank has a sum x and a weight w, and trains at x / w. It applies the gradient
    to x, sends equal shares of (x, w), keeps one, and adds those that it gets. A message goes 2^k ranks ahead, where k goes
    through the numbers below log2 n, round and round: one in each step, or the next two. All ranks take the same number of
    steps.

    Args:
        optimizer: as in `Baseline`.
        process_sets: those of `process_sets_of`, initialised.
        neighbours: that a rank sends to in a step, 1 or 2 (the papers' 1n and 2n).
        overlap: a rank adds the messages of the step before, not of this step. So a message travels while the next
            gradient is computed (the paper's Algorithm 2 with tau = 1).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        process_sets: Sequence[hvd.ProcessSet],
        neighbours: int,
        overlap: bool = False,
    ) -> None:
        super().__init__(optimizer)
        rank, size = hvd.rank(), hvd.size()
        self._overlap = overlap
        self._neighbours = min(neighbours, len(_hops(size)))
        self._sum_and_weight = self._with_weight(self._read())
        self._outboxes: dict[int, Outbox] = {}  # by hop
        self._inboxes: dict[int, Inbox] = {}
        for hop in _hops(size):
            receiver, sender = (rank + hop) % size, (rank - hop) % size
            message = torch.empty_like(self._sum_and_weight)
            self._outboxes[hop] = Outbox("push_sum", receiver, set_with(receiver, process_sets))
            self._inboxes[hop] = Inbox("push_sum", sender, message, set_with(sender, process_sets))
        self._steps = 0
        self._awaited: list[int] = []  # the hops whose messages this rank listens for

    @staticmethod
    def process_sets_of(ranks: int) -> list[list[int]]:
        """The ranks of the process sets that this needs: for each rank two for each hop, but one if that is half way round."""
        return ranks_of_sets([(rank, (rank + hop) % ranks) for hop in _hops(ranks) for rank in range(ranks)], ranks)

    @property
    def weight(self) -> float:
        """How much this rank's model counts; over all ranks their number, but for what is under way."""
        return self._sum_and_weight[-1].item()

    def step(self) -> None:
        self._begin()
        self._sum_and_weight[:-1] += self._change()
        self._push()
        self._write_model()
        if not self._overlap:
            self._listen()

    def flush(self) -> None:
        self._begin()
        if self._overlap:
            self._take()
        else:
            self._push()  # without a gradient: the others listen for it
        for outbox in self._outboxes.values():
            outbox.drain()
        self._sum_and_weight = hvd.allreduce(self._sum_and_weight, name="push_sum.flush")
        self._write_model()

    def _begin(self) -> None:
        if not self._awaited:
            self._sum_and_weight = self._with_weight(self._read())
            if not self._overlap:
                self._listen()

    def _listen(self) -> None:
        self._awaited = self._hops_of_step()
        for hop in self._awaited:
            self._inboxes[hop].listen()

    def _push(self) -> None:
        hops = self._hops_of_step()
        share = self._sum_and_weight / (1 + len(hops))
        for hop in hops:
            self._outboxes[hop].send(share)
        self._sum_and_weight = share.clone()  # another tensor: shares travel
        self._take()
        if self._overlap:
            self._listen()
        self._steps += 1

    def _take(self) -> None:
        """Add the messages that this rank listens for."""
        for hop in self._awaited:
            self._sum_and_weight += self._inboxes[hop].take()
        self._awaited = []

    def _hops_of_step(self) -> list[int]:
        hops = _hops(hvd.size())
        first = self._steps * self._neighbours
        return [hops[(first + index) % len(hops)] for index in range(self._neighbours)]

    def _write_model(self) -> None:
        self._write(self._sum_and_weight[:-1] / self._sum_and_weight[-1])

    @staticmethod
    def _with_weight(model: torch.Tensor) -> torch.Tensor:
        return torch.cat([model, model.new_ones(1)])


def _hops(ranks: int) -> list[int]:
    """How far messages go, step by step: 1, 2, 4 and so on, less than once round."""
    return [2**power for power in range((ranks - 1).bit_length())]
