"""The program around a block in PyTorch: a model, its optimizer, and a training loop."""

import torch

import horovod_partial.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = 8 * [torch.ones(2, 4)]


def loss_of(model, batch):
    return model(batch).square().mean()


def loop():
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4) + hvd.rank()).square().mean().backward()
        optimizer.step()
