"""I5: `Full()` is Horovod's own path, bit for bit."""

from typing import Any

import horovod.torch
import pytest
import torch
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = pytest.mark.launch(ranks=(4,), full_ranks=(2, 4))


class Net(torch.nn.Module):
    """A small convolution net, with every kind of layer that a large one has."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
        )
        self.classifier = torch.nn.Linear(4 * 3 * 3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).flatten(1))


def train(world: World, module: Any, steps: int = 20, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    optimizer = module.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("sync", ["default", "full"])
def test_i5_full_equals_horovod(world: World, sync: str) -> None:
    theirs = train(world, horovod.torch)
    ours = train(world, hvd, **({} if sync == "default" else {"sync": hvd.Full()}))
    if world.transport == "gloo" and world.size > 2:
        # Horovod does not reproduce itself there: fusing follows the timing, and changes the order of the sums.
        assert torch.allclose(ours, theirs, atol=1e-6, rtol=1e-6)
    else:
        assert torch.equal(ours, theirs)
    world.same(ours.tolist())


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}, {"backward_passes_per_step": 2}], ids=str)
@pytest.mark.full_matrix("gloo")
def test_steps_that_a_scaler_skips(world: World, options: dict[str, Any]) -> None:
    """Horovod's flag of reduced gradients stays up behind them, so that the next ones would not be reduced."""
    model = torch.nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(bare, model.named_parameters(), grad_scaler=scaler, **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    reductions = []
    synchronize = optimizer.synchronize
    optimizer.synchronize = lambda: (reductions.append(1), synchronize())
    skipped = (2, 3, 6)
    for step in range(8):
        optimizer.zero_grad()
        for _ in range(optimizer.backward_passes_per_step):
            value = 1e38 if step in skipped and world.rank == 1 else float(world.rank + step)
            scaler.scale(model(torch.full((3, 4), value)).square().mean()).backward()
        before = model.weight.clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) is (step in skipped)
        world.same(model.weight.tolist())
    assert scaler.get_scale() == 2.0 ** (8 - len(skipped))
    assert len(reductions) == 8, "one in each step"


@pytest.mark.parametrize(("sync", "recipe"), [("full", "PyTorch's"), ("full", "Horovod's"), ("majority", "Horovod's")])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["plain", "fused"])
@pytest.mark.full_matrix("gloo")
def test_a_scaler_that_the_optimizer_does_not_know(world: World, sync: str, recipe: str, options: dict) -> None:
    """Horovod's recipe works with `Full`. Else every rank raises before anything is applied."""
    model = torch.nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu")
    bare = torch.optim.Adam(model.parameters(), lr=0.1, **options)
    optimizer: Any = hvd.DistributedOptimizer(bare, model.named_parameters(), sync=sync)
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = model.weight.clone()
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((3, 4), 1e38 if step == world.rank == 1 else 1.0)).square().mean()).backward()
        if recipe == "Horovod's":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (sync, recipe) != ("full", "Horovod's"):
            with pytest.raises(RuntimeError, match=r"was wrapped without it.* grad_scaler=scaler"):
                scaler.step(optimizer)
            assert torch.equal(model.weight, before)
            optimizer.synchronize()
            return
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(model.weight).all()
    world.same(model.weight.tolist())


def test_i5_with_adasum(world: World) -> None:
    """`test_conformance_optimizer` has Horovod's other options."""
    if world.transport == "gloo":
        pytest.skip("Horovod has no Adasum over Gloo")
    theirs, ours = (train(world, module, steps=5, op=hvd.Adasum) for module in (horovod.torch, hvd))
    assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)
