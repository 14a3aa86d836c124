"""A training in PyTorch with merged gradients, whose plan is there."""

import torch

import horovod_partial.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), merging=hvd.MergedGradients(warmup_steps=2))
while optimizer.merging_plan is None:
    optimizer.zero_grad()
    model(torch.ones(2, 4) + hvd.rank()).square().mean().backward()
    optimizer.step()
