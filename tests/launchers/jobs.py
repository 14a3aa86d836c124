"""Jobs that are sent to workers beside `digits.train`: what users do around a training loop, and what goes wrong."""

from pathlib import Path
from typing import Any


def settings() -> tuple[str, float]:
    """The policy and the size of buckets that this rank trains with."""
    import horovod_partial.torch as hvd
    from horovod_partial.settings import settings

    hvd.init()
    hvd.shutdown()
    return settings().sync, settings().bucket_mb


def fail() -> None:
    """Rank 1 fails between two steps, while the others go on."""
    import torch

    import horovod_partial.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for step in range(1000):
        if (hvd.rank(), step) == (1, 10):
            raise RuntimeError("planned failure")
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()
    optimizer.flush()


def stop_and_resume(folder: str) -> tuple[int, float, list[int]]:
    """Ranks with unequal data train to the end of their own, save, and do so again from what was saved.

    Returns:
        The epoch that the schedule has come to, its rate, and the steps of this rank in each of the two parts.
    """
    import torch

    import horovod_partial.torch as hvd

    hvd.init()
    path = Path(folder) / "saved.pt"
    steps = []
    for part in range(2):
        torch.manual_seed(part)
        model = torch.nn.Linear(4, 2)
        bare = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync=hvd.Majority())
        schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5))
        if part == 1:
            saved: dict[str, Any] = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        steps.append(20 + 10 * hvd.rank())
        for _ in range(steps[-1]):
            optimizer.zero_grad()
            (0.01 * model(torch.randn(8, 4)).square().mean()).backward()
            optimizer.step()
        optimizer.flush()
        hvd.assert_replicas_equal(model, optimizer)
        hvd.save_checkpoint(path, model, optimizer, schedule=schedule)
        hvd.barrier()
    rate = schedule.get_last_lr()[0]
    hvd.shutdown()
    return schedule.last_epoch, rate, steps
