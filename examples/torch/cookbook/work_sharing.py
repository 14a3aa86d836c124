"""Work sharing: a loop over epochs with validation and checkpoints, which goes on in the middle of an epoch."""

import sys
import tempfile
from pathlib import Path

import torch
from data import digits, network
from torch.utils.data import DataLoader, TensorDataset

import horovod_partial.torch as hvd
from horovod_partial.torch.dynamic_sharding import DynamicShardingLoader, DynamicShardingSampler

PASSES, EPOCHS = 4, 2


def run(path: Path, until: int, sync: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train until so many updates have been made; go on from the checkpoint if there is one, in a file that all ranks can read."""
    model = network()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = hvd.DistributedOptimizer(adamw, model.named_parameters(), backward_passes_per_step=PASSES, sync=sync)
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95))
    images, labels = digits()
    training = TensorDataset(images[200:], labels[200:])
    sampler = DynamicShardingSampler(training, batch_size=16, backward_passes_per_step=PASSES)
    loader = DynamicShardingLoader(DataLoader(training, batch_sampler=sampler, num_workers=1), optimizer)
    if path.exists():
        saved = torch.load(path)
        for name, each in {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}.items():
            each.load_state_dict(saved[name])

    def save(_: torch.optim.Optimizer) -> None:
        if schedule.last_epoch % 5 == 0:  # updates in all; `optimizer.rounds` are those of this process
            hvd.save_checkpoint(path, model, optimizer, schedule=schedule, sampler=sampler)

    optimizer.register_round_hook(save)  # after the schedule's: it is called once for each update, on every rank
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch, classes in loader:
            (torch.nn.functional.cross_entropy(model(batch), classes) / PASSES).backward()
            optimizer.step()
            if schedule.last_epoch >= until:
                return model, optimizer
        with torch.no_grad():
            right = (model(images[:200]).argmax(1) == labels[:200]).float().mean()
        print(f"epoch {epoch}: accuracy {hvd.allreduce(right, name='accuracy').item():.3f}")
    return model, optimizer


def train(sync: str = "work_sharing", stop: int = 12) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    path = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0)) / "checkpoint.pt"
    run(path, stop, sync)  # ends in the middle of an epoch, after update 12
    hvd.barrier()
    return run(path, 1000, sync)  # goes on after update 10


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
