"""Lightning and Accelerate around ours, beyond the loops of the cookbook: schedules, saving and resuming, and what is refused."""

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.matrix import OVER_MPI
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = pytest.mark.launch(**OVER_MPI, ranks=(2,))  # in ranks of larger jobs Lightning finds no compiler

COOKBOOK = Path(__file__).resolve().parents[2] / "examples" / "torch" / "cookbook"
STEPS = 10  # in each of two epochs


def shared_folder() -> Path:
    """One that all ranks see."""
    return hvd.broadcast_object(Path(tempfile.mkdtemp()), root_rank=0, name="folder")


@pytest.fixture
def lightning_loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    monkeypatch.setattr(sys, "path", [str(COOKBOOK), *sys.path])
    return importlib.import_module("lightning_loop")


def make_trainer(loop: Any, epochs: int, **options: Any) -> Any:
    off = ("logger", "enable_progress_bar", "enable_model_summary")
    return loop.lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        plugins=loop.LightningEnvironment(),
        **dict.fromkeys(off, False),
        **options,
    )


def loader(loop: Any) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(list(loop.batches(STEPS)), batch_size=None)


def test_lightning_saves_and_resumes(world: World, lightning_loop: Any) -> None:
    folder = shared_folder()

    class Scheduled(lightning_loop.Digits):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, STEPS, gamma=0.5))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def fit(epochs: int, checkpoint: Path | None) -> tuple[Any, Any]:
        saves: dict[str, Any] = {"enable_checkpointing": world.rank == 0}
        if world.rank == 0:
            callback = lightning_loop.lightning.pytorch.callbacks.ModelCheckpoint(folder, filename=f"{epochs}")
            saves["callbacks"] = [callback]
        model, trainer = Scheduled("majority"), make_trainer(lightning_loop, epochs, **saves)
        trainer.fit(model, loader(lightning_loop), ckpt_path=checkpoint)
        hvd.assert_replicas_equal(model, trainer.optimizers[0])
        hvd.barrier()
        return model, trainer

    first, _ = fit(1, None)
    saved = torch.load(folder / "1.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in first.state_dict().items())
    _, trainer = fit(2, folder / "1.ckpt")
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-3 * 0.5**2


def test_lightning_does_not_clip(world: World, lightning_loop: Any) -> None:
    trainer = make_trainer(lightning_loop, 1, enable_checkpointing=False, gradient_clip_val=1.0)
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        trainer.fit(lightning_loop.Digits("majority"), loader(lightning_loop))


@pytest.fixture
def accelerator() -> Any:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    return accelerate.Accelerator(device_placement=False)


def make_all(accelerator: Any) -> tuple[Any, ...]:
    """A model, the optimizer, and as Accelerate prepares them, a schedule too."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    bare = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync=hvd.Majority())
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, STEPS, gamma=0.5))
    return optimizer, schedule, *accelerator.prepare(model, optimizer)


def test_accelerate_saves_and_resumes(world: World, accelerator: Any) -> None:
    folder = shared_folder()
    for part in range(2):
        optimizer, schedule, model, prepared = make_all(accelerator)
        accelerator.register_for_checkpointing(schedule)
        if part == 1:
            accelerator.load_state(str(folder))
        for _ in range(STEPS):
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            prepared.step()
            prepared.zero_grad()
        optimizer.flush()
        if part == 0 and world.rank == 0:
            accelerator.save_state(str(folder))
        hvd.barrier()
        hvd.assert_replicas_equal(model, optimizer)
        accelerator.free_memory()
        accelerator._custom_objects.clear()
    assert schedule.get_last_lr() == [0.1 * 0.5**2]


def test_accelerate_shares_work(world: World, accelerator: Any) -> None:
    """Each micro-batch has a step, so Accelerate accumulates nothing, and divides no loss."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    bare = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(bare, sync=hvd.WorkSharing(), backward_passes_per_step=3)
    model, prepared = accelerator.prepare(model, optimizer)
    while optimizer.rounds < 2:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1)).sum() / 3)
            prepared.step()
            prepared.zero_grad()
    optimizer.flush()
    assert model.weight.item() == pytest.approx(-2.0)


def test_accelerate_does_not_clip(world: World, accelerator: Any) -> None:
    _, _, model, prepared = make_all(accelerator)
    accelerator.backward(model(torch.ones(8, 4)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        prepared.step()


def test_lightning_shows_each_epoch_other_batches(world: World, lightning_loop: Any) -> None:
    seen: list[list[int]] = [[], []]

    class Watched(lightning_loop.Digits):
        def training_step(self, batch: Any, number: int) -> Any:
            seen[self.current_epoch] += batch[2].tolist()
            return super().training_step(batch[:2], number)

    data = [(*sample, number) for number, sample in enumerate(zip(*next(iter(lightning_loop.batches(1))), strict=True))]
    sampler = hvd.BalancedBatchSampler([1] * len(data), 4)
    trainer = make_trainer(lightning_loop, 2, enable_checkpointing=False, use_distributed_sampler=False)
    trainer.fit(Watched("majority"), torch.utils.data.DataLoader(data, batch_sampler=sampler))
    assert sampler.epoch == 1
    assert seen[0] != seen[1]
    hvd.barrier()


def test_accelerate_shows_each_epoch_other_batches(world: World) -> None:
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed", exc_type=ImportError)
    sampler = hvd.BalancedBatchSampler([1] * (40 * world.size), 4)
    data = torch.utils.data.DataLoader(range(40 * world.size), batch_sampler=sampler)
    loader = accelerate.Accelerator(device_placement=False).prepare(data)
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen.append([batch.tolist() for batch in loader])
    assert len(seen[0]) == 10
    assert seen[0] != seen[1]
    hvd.barrier()
