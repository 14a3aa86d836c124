"""A training in PyTorch whose steps have four micro-batches, and one epoch of it behind the block."""

from argparse import Namespace

import torch
from torch.utils.data import DataLoader

import horovod_partial.torch as hvd
from horovod_partial.torch.dynamic_sharding import DynamicShardingLoader, DynamicShardingSampler

hvd.init()


class Model(torch.nn.Linear):
    def forward(self, x):
        return Namespace(loss=super().forward(x).square().mean())


def loss_of(model, batch):
    return model(**batch).loss


dataset = [{"x": torch.ones(4)}] * 1000
model = Model(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model.named_parameters(),
    backward_passes_per_step=4,
    sync=hvd.WorkSharing(),
)
lr_scheduler = schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
sampler = DynamicShardingSampler(dataset, batch_size=32, backward_passes_per_step=4)
train_dataloader = DynamicShardingLoader(DataLoader(dataset, batch_sampler=sampler), optimizer)
epochs = 2
args = Namespace(num_train_epochs=2, gradient_accumulation_steps=4, max_train_steps=3)
progress_bar = Namespace(update=lambda _: None)


def afterwards():
    sampler.set_epoch(epochs)
    for batch in train_dataloader:
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.flush()
    hvd.assert_replicas_equal(model, optimizer)
