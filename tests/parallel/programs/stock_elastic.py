"""An elastic program for Horovod and PyTorch, which trains until it has had three ranks for a while."""

import horovod.torch as hvd
import torch
from common import count_step, note

hvd.init()
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, steps=0, steps_at_final_size=0)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.steps_at_final_size < 20:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        count_step(state, hvd.size() == 3)
        if state.steps % 5 == 0:
            state.commit()


train(state)
note("ended", f"{hvd.size()} {hvd.init.__module__}")
