"""Pyro's stochastic variational inference with its `HorovodOptimizer`: a line through noisy points."""

import horovod.torch as hvd
import pyro
import torch
from pyro import distributions
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam, HorovodOptimizer


def line(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    slope = pyro.sample("slope", distributions.Normal(0, 1))
    scale = pyro.sample("scale", distributions.LogNormal(0, 1))
    with pyro.plate("points", len(x)):
        return pyro.sample("y", distributions.Normal(slope * x, scale), obs=y)


hvd.init()
pyro.set_rng_seed(20 + hvd.rank())
x = torch.randn(100)
y = 2 * x + torch.randn(100)
guide = AutoNormal(line)
guide(x[:1], y[:1])
hvd.broadcast_parameters(guide.state_dict(), root_rank=0)
svi = SVI(line, guide, HorovodOptimizer(Adam({"lr": 0.01})), Trace_ELBO())
for first in range(0, 100, 10):
    svi.step(x[first : first + 10], y[first : first + 10])
hvd.shutdown()
