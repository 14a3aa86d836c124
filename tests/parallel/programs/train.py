"""Trains for ever, or until something happens: `train.py POLICY WHAT`, see `common.is_over` for what that may be."""

import itertools
import sys

import torch
from common import RANK, end, is_over, note

import horovod_partial.torch as hvd

policy, what = sys.argv[1:]
torch.set_num_threads(1)
hvd.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01),
    model.named_parameters(),
    # With this limit each round is taken at once, and none is left for the end.
    sync=f"{policy}:replay_limit=2" if what == "metric" else policy,
)
hvd.broadcast_parameters(model.state_dict(), 0)


class Failing(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("planned failure in backward")


def step(number: int) -> None:
    optimizer.zero_grad()
    x = model[0](torch.randn(4, 8))
    if what == "backward" and RANK == 1 and number == 20:
        x = Failing.apply(x)
    model[2](model[1](x)).square().mean().backward()
    optimizer.step()


def run() -> None:
    for number in itertools.count():
        step(number)
        if is_over(what, number, hvd.shutdown):
            break


try:
    run()
except hvd.HorovodInternalError as error:
    note("internal-error", str(error))
    raise
if what in ("flushed", "uneven"):
    optimizer.flush()
if what == "metric":  # the rank that has ended before takes rounds meanwhile
    hvd.allreduce(torch.ones(1), name="metric")
end(
    what,
    hvd.shutdown,
    lambda: hvd.partial_allreduce(torch.ones(1), name="after", sync="solo"),
    str(optimizer.rounds) if what != "shutdown" else "",
)
