"""Data for `sync=hvd.WorkSharing()`: every sample once, whoever makes its micro-batch."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.matrix import OVER_MPI, alone
from harness.world import World
from torch.utils.data import DataLoader, Dataset

import horovod_partial.torch as hvd
from horovod_partial.torch.dynamic_sharding import DynamicShardingLoader, DynamicShardingSampler, micro_batch_seed

pytestmark = pytest.mark.launch(**OVER_MPI, full_ranks=(2, 3, 4))

PASSES = 2
BATCH_SIZE = 2
UPDATES = 3  # of an epoch


class Numbers(Dataset[float]):
    """Each sample is its index."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> float:
        if not 0 <= index < self._samples:
            raise IndexError(index)
        return float(index)


class Augmented(Numbers):
    """Its samples differ by epoch."""

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError


class Training:
    """A small training, of which one rank is slow: in each of its micro-batches the others make all that are left.

    Attributes:
        made: what this rank has made: rounds before, the number of the micro-batch, its samples and its seed.
    """

    def __init__(self, world: World, label: str, slow: int = 1, workers: int = 0, **options: Any) -> None:
        self.world = world
        self._label = label
        self._slow = slow
        self.samples = options.pop("samples", UPDATES * PASSES * BATCH_SIZE * world.size)
        self.sampler = DynamicShardingSampler(self.samples, BATCH_SIZE, PASSES, seed=3, **options)
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([self.weight], lr=1e-3), backward_passes_per_step=PASSES, sync="work_sharing"
        )
        data = DataLoader(Numbers(self.samples), batch_sampler=self.sampler, num_workers=workers)
        self.loader = DynamicShardingLoader(data, self.optimizer)
        self.made: list[tuple[int, int, list[int], int]] = []

    def loop(self, until: int | None = None) -> Iterator[int]:
        """One loop over the data, left with the first batch of update `until`. Gives the updates that have been made after each step."""
        for batch in self.loader:
            rounds, number = self.optimizer.begin_micro_batch()
            if rounds == until:
                return
            seed = micro_batch_seed(self.optimizer, base=7)
            self.optimizer.zero_grad()
            loss = (self.weight * batch.mean()).sum()
            if self.world.rank == self._slow and rounds > 0:
                for other in set(range(PASSES * self.world.size)) - {number}:
                    self.world.wait_for(f"{self._label}.{rounds}.{other}")
            loss.backward()
            self.world.tell(f"{self._label}.{rounds}.{number}")  # a step may wait for the slow one
            self.optimizer.step()
            self.made.append((rounds, number, [int(index) for index in batch.tolist()], seed))
            yield self.optimizer.rounds

    def epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)
        for _ in self.loop():
            pass

    def gather(self) -> dict[tuple[int, int], list[int]]:
        """The samples of each micro-batch of all ranks, each of which one rank has made, by rounds and number."""
        made = [each for of_rank in self.world.gather(self.made) for each in of_rank]
        samples = {(rounds, number): indices for rounds, number, indices, _ in made}
        assert len(samples) == len(made)
        return samples

    def planned(self, epoch: int, first: int = 0, updates: int = UPDATES) -> dict[tuple[int, int], list[int]]:
        """The samples that they should have, where an epoch begins after so many rounds."""
        size = self.world.size
        plan = DynamicShardingSampler(self.samples, BATCH_SIZE, PASSES, seed=3, drop_last=self.sampler.drop_last)
        plan.set_epoch(epoch)
        numbers = [(update, number) for update in range(updates) for number in range(PASSES * size)]
        return {(first + update, number): plan.indices(update, number) for update, number in numbers}


def once(samples: dict[tuple[int, int], list[int]]) -> list[int]:
    return sorted(index for indices in samples.values() for index in indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_comes_once(world: World, workers: int) -> None:
    training = Training(world, "training", workers=workers)
    training.epoch(0)
    world.same(training.optimizer.rounds)
    assert training.optimizer.rounds == UPDATES
    training.epoch(1)
    assert training.optimizer.rounds == 2 * UPDATES
    made = training.gather()
    assert made == training.planned(0) | training.planned(1, UPDATES)
    assert once(made) == sorted(2 * list(range(training.samples)))
    if world.rank == 1:  # it makes its own in the first update, and at most one in each of the others
        assert len(training.made) <= PASSES + 2 * UPDATES - 1
    training.optimizer.flush()
    hvd.assert_replicas_equal(torch.nn.ParameterList([training.weight]), training.optimizer)


def test_a_checkpoint_costs_no_sample(world: World, tmp_path: Path) -> None:
    """A rank comes late to the loop, when the others have made an update. In a round hook all save the same."""
    training = Training(world, "training", slow=-1)
    model = torch.nn.ParameterList([training.weight])
    path = Path(world.gather(str(tmp_path / "checkpoint"))[0])
    states = []

    def save(optimizer: Any) -> None:
        hvd.save_checkpoint(path, model, optimizer, sampler=training.sampler)
        states.append((training.weight.tolist(), training.sampler.update, optimizer.rounds))

    training.optimizer.register_round_hook(save)
    for rounds in training.loop():
        hvd.save_checkpoint(path, model, training.optimizer)
        if world.rank == 1 and rounds == 1:
            world.wait_for("training.1.0")
            time.sleep(0.1)
    assert training.gather() == training.planned(0)
    assert [(update, rounds) for _, update, rounds in world.same(states)] == [(n, n) for n in range(1, UPDATES + 1)]
    assert world.gather(path.exists())[0]


def test_the_seed_follows_the_micro_batch(world: World) -> None:
    """Two trainings with another slow rank: other ranks make the same micro-batches."""
    seeds: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for slow in (0, 1):
        training = Training(world, f"slow.{slow}", slow)
        training.epoch(0)
        for rank, made in enumerate(world.gather(training.made)):
            for rounds, number, _, seed in made:
                seeds.setdefault((rounds, number), set()).add((rank, seed))
        del training
    assert all(len({seed for _, seed in made}) == 1 for made in seeds.values())
    assert any(len({rank for rank, _ in made}) == 2 for made in seeds.values())
    assert len({seed for made in seeds.values() for _, seed in made}) == len(seeds)


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_last_update_is_whole(world: World, drop_last: bool) -> None:
    of_update = PASSES * BATCH_SIZE * world.size
    training = Training(world, "training", samples=of_update + 3, drop_last=drop_last)
    training.epoch(0)
    updates = 1 if drop_last else 2
    assert training.optimizer.rounds == updates
    made = training.gather()
    assert made == training.planned(0, updates=updates)
    counts = Counter(once(made))
    if drop_last:
        assert set(counts.values()) == {1}
    else:
        assert sum(counts.values()) == 2 * of_update
        assert set(counts) == set(range(of_update + 3))


def test_goes_on_within_an_epoch(world: World) -> None:
    """Two updates are made in one training, and the rest in another one."""
    training = Training(world, "before")
    training.sampler.set_epoch(4)
    for _ in training.loop(until=2):  # behind a step a rank may have made a micro-batch of the next update already
        pass
    training.optimizer.flush()
    assert training.optimizer.rounds == 2
    state = world.same(training.sampler.state_dict())
    assert state == {"epoch": 4, "update": 2, "samples": 2 * PASSES * BATCH_SIZE * world.size}
    with pytest.raises(RuntimeError, match="an epoch is under way"):
        training.sampler.load_state_dict(state)
    made = training.gather()
    del training
    training = Training(world, "after", workers=2)
    training.sampler.load_state_dict(state)
    assert len(training.loader) == PASSES * (UPDATES - 2)
    for rounds in training.loop():
        in_loop = UPDATES - 2 if rounds < UPDATES - 2 else UPDATES  # of this one, or of the next
        assert len(training.loader) == PASSES * in_loop
    assert training.optimizer.rounds == UPDATES - 2
    assert training.sampler.update == UPDATES
    rest = training.gather()
    assert sorted(once(made) + once(rest)) == list(range(training.samples))
    assert made | {(rounds + 2, number): each for (rounds, number), each in rest.items()} == training.planned(4)
    training.epoch(5)
    assert training.optimizer.rounds == 2 * UPDATES - 2


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full_matrix)])
def test_a_loop_may_be_left_early(world: World, workers: int) -> None:
    """Each rank leaves it after another number of batches, rank 0 with a batch; the next loop begins with the rest."""
    training = Training(world, "training", slow=-1, workers=workers)
    for batch in training.loader:
        assert len(batch) == BATCH_SIZE
        assert training.optimizer._exchange.work.begun is not None
        if world.rank == 0:
            break
        rounds, number = training.optimizer.begin_micro_batch()
        training.weight.sum().backward()
        training.optimizer.step()
        training.made.append((rounds, number, batch.tolist(), 0))
        if len(training.made) == world.rank:
            break
    assert training.optimizer._exchange.work.begun is None
    assert training.sampler.epoch == 0
    training.epoch(1)
    assert training.optimizer.rounds == 2 * UPDATES
    assert training.sampler.epoch == 1
    assert training.gather() == training.planned(0) | training.planned(1, UPDATES)


def test_loaders_take_turns(world: World) -> None:
    """The updates of a second one follow those of the first, of which some ranks have not seen the end."""
    training = Training(world, "training")
    sampler = DynamicShardingSampler(PASSES * world.size * 2, 1, PASSES)
    data = [float(1000 + index) for index in range(PASSES * world.size * 2)]
    other = DynamicShardingLoader(DataLoader(data, batch_sampler=sampler), training.optimizer)  # type: ignore[arg-type]
    loaders = training.loader, other
    for training.loader in (*loaders, *loaders):
        for _ in training.loop():
            pass
    made = training.gather()
    of_first = {key: each for key, each in made.items() if each[0] < 1000}
    assert of_first == training.planned(0) | training.planned(0, UPDATES + 2)
    assert once({key: each for key, each in made.items() if each[0] >= 1000}) == sorted(2 * [int(x) for x in data])
    assert training.optimizer.rounds == 2 * (UPDATES + 2)


def test_a_rank_may_stay_away(world: World) -> None:
    """Between two epochs it evaluates, while the others make the next one: it is not told of each update by a batch."""
    training = Training(world, "training", slow=-1, workers=2)
    training.epoch(0)
    if world.rank == 0:
        world.wait_for(f"training.{2 * UPDATES - 2}.0")
    training.epoch(1)
    assert training.optimizer.rounds == 2 * UPDATES
    assert training.gather() == training.planned(0) | training.planned(1, UPDATES)
    assert world.rank != 0 or len(training.made) <= PASSES * (UPDATES + 2 * world.size)


def test_the_data_goes_on_when_the_optimizer_gets_parameters(world: World) -> None:
    training = Training(world, "training", slow=-1)
    training.epoch(0)
    training.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert training.optimizer.rounds == UPDATES
    assert training.sampler.state_dict()["update"] == UPDATES
    training.sampler.set_epoch(1)
    for rounds in training.loop():
        assert training.sampler.state_dict()["update"] == rounds - UPDATES
    assert training.optimizer.rounds == 2 * UPDATES
    assert training.gather() == training.planned(0) | training.planned(1, UPDATES)


# --- One loop for every policy


@pytest.mark.parametrize("sync", ["full", "quorum:1.0", "majority", "work_sharing", "group_average:2"])
@pytest.mark.parametrize("kind", ["loader", "own data"])
@pytest.mark.one_in(2)
def test_one_loop_serves_every_policy(world: World, sync: str, kind: str) -> None:
    passes = 1 if sync == "group_average:2" else PASSES
    inputs = torch.randn(12 * world.size * BATCH_SIZE, 3, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(3, 1)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    scaler = None if passes == 1 else torch.amp.GradScaler("cpu", init_scale=64.0)
    options: dict[str, Any] = {"step_each_pass": True} if kind == "own data" else {}
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        backward_passes_per_step=passes,
        sync=sync,
        grad_scaler=scaler,
        **options,
    )
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5))
    sampler = DynamicShardingSampler(len(inputs), BATCH_SIZE, passes, seed=3)
    data = DataLoader(Numbers(len(inputs)), batch_sampler=sampler)
    loader = DynamicShardingLoader(data, optimizer) if kind == "loader" else data
    seen: Counter[int] = Counter()
    updates = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            micro_batch_seed(optimizer)
            seen.update(batch.int().tolist())
            loss = model(inputs[batch.int()]).square().mean() / passes
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            updates += optimizer.updated
            if kind == "loader" and number == 2 and epoch == 0 and sync != "work_sharing":
                break  # the rest of this epoch comes first in the next loop
    optimizer.flush()
    every_sample = sum(world.gather(seen), Counter())
    if kind == "loader" or sync != "work_sharing":  # with its own data a slow rank uses less of it
        assert set(every_sample) == set(range(len(inputs)))
        assert set(every_sample.values()) == {2}
        assert world.same(updates) == 2 * 12 // passes or sync == "work_sharing"
    if sync in ("full", "quorum:1.0") or (sync, kind) == ("work_sharing", "loader"):
        assert optimizer.rounds in (12, 13)  # a flush has a round, too
        expected = torch.nn.Linear(3, 1)
        for parameter in expected.parameters():
            torch.nn.init.ones_(parameter)
        alone = torch.optim.SGD(expected.parameters(), lr=0.1)
        rates = torch.optim.lr_scheduler.StepLR(alone, 4, 0.5)
        for epoch in range(2):
            order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(3 + epoch))
            for chosen in order.split(passes * world.size * BATCH_SIZE):
                alone.zero_grad()
                expected(inputs[chosen]).square().mean().backward()
                alone.step()
                rates.step()
        close = [
            torch.allclose(*both, atol=1e-5) for both in zip(model.parameters(), expected.parameters(), strict=True)
        ]
        assert all(close)
        assert schedule.get_last_lr() == rates.get_last_lr()


@alone
@pytest.mark.parametrize("sync", ["full", "quorum:1.0", "group_average:2"])
@pytest.mark.parametrize("kind", ["closure", "unscaled", "overflow"])
def test_steps_within_an_update(world: World, sync: str, kind: str) -> None:
    """The gradients of four passes are 1, 10, 100 and 1000, and all of them count."""
    weight = torch.nn.Parameter(torch.zeros(1))
    scaler = None if kind == "closure" else torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        backward_passes_per_step=4,
        sync=sync,
        grad_scaler=scaler,
        step_each_pass=True,
    )
    for update in range(2):
        for number in range(4):
            loss = (weight * 10.0**number).sum()
            loss = loss * float("inf") if (kind, update, number) == ("overflow", 0, 1) else loss

            def closure(loss: torch.Tensor = loss) -> torch.Tensor:
                optimizer.zero_grad()
                loss.backward()
                return loss

            if scaler is None:
                assert optimizer.step(closure) is loss
            else:
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer) if kind == "unscaled" else None
                scaler.step(optimizer)
                scaler.update()
            assert optimizer.updated == (number == 3)
            if number == 1:
                refused = pytest.raises(RuntimeError, match="within an update")
                with refused if sync != "group_average:2" else contextlib.nullcontext():  # there it awaits an average
                    optimizer.synchronize()
                with pytest.raises(ValueError, match="cannot change within an update"):
                    optimizer.set_backward_passes_per_step(2)
    assert weight.item() == (-1111 if kind == "overflow" else -2222)
    assert kind == "overflow" or optimizer.rounds == 2


def one_weight(sync: str) -> tuple[torch.nn.Parameter, Any]:
    """A weight of 0, and an optimizer of updates of two passes, whose `step` comes after each."""
    weight = torch.nn.Parameter(torch.zeros(1))
    return weight, hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2, sync=sync, step_each_pass=True
    )


@alone
@pytest.mark.parametrize("sync", ["full", "quorum:1.0"])
def test_a_step_that_fails_ends_its_update(world: World, sync: str) -> None:
    weight, optimizer = one_weight(sync)

    def fail(optimizer: Any) -> None:
        raise OSError("a round hook fails")

    hook = optimizer.register_round_hook(fail)
    weight.sum().backward()
    optimizer.step()
    weight.sum().backward()
    with pytest.raises(OSError, match="a round hook fails"):
        optimizer.step()
    assert optimizer.updated == 1
    hook.remove()
    optimizer.zero_grad()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="within an update"):
        optimizer.synchronize()


@alone
@pytest.mark.parametrize("sync", ["full", "quorum:1.0"])
def test_a_loaded_state_begins_an_update(world: World, sync: str) -> None:
    weight, optimizer = one_weight(sync)
    weight.sum().backward()
    optimizer.step()
    assert optimizer.ends_update
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.ends_update
    optimizer.zero_grad()
    assert weight.grad is None


# --- One rank


@alone
@pytest.mark.parametrize("workers", [0, 2])
def test_works_alone(world: World, workers: int) -> None:
    training = Training(world, "training", workers=workers)
    seen: list[int] = []
    training.optimizer.register_round_hook(lambda optimizer: seen.append(optimizer.rounds))
    for rounds in training.loop():
        if rounds == 1:
            break
    assert training.sampler.state_dict() == {"epoch": 0, "update": 1, "samples": PASSES * BATCH_SIZE}
    training.epoch(1)
    training.optimizer.flush()
    assert training.optimizer.rounds == 2 * UPDATES
    assert seen == list(range(1, 2 * UPDATES + 1))
    assert training.gather() == training.planned(0) | training.planned(1, UPDATES)
    assert [number for _, number, _, _ in training.made] == 2 * UPDATES * [0, 1]


@alone
def test_pins_what_it_loads_as_workers_do(world: World) -> None:
    training = Training(world, "training")
    many: Any = torch.utils.data.Subset(Numbers(100), range(training.samples))  # which has `__getitems__`
    data = DataLoader(many, batch_sampler=training.sampler, collate_fn=torch.tensor, pin_memory=True)
    training.loader = DynamicShardingLoader(data, training.optimizer)
    batch = next(iter(training.loader))
    assert batch.is_pinned() == torch.cuda.is_available()
    assert batch.tolist() == training.sampler.indices(0, 0)


@alone
def test_each_batch_has_one_step(world: World) -> None:
    training = Training(world, "training")
    backward = lambda: training.weight.sum().backward()
    for call in (backward, training.optimizer.step, lambda: micro_batch_seed(training.optimizer)):
        with pytest.raises(RuntimeError, match="no micro-batch has begun here"):
            call()
    with pytest.raises(RuntimeError, match="no step was taken with the last batch"):
        for _ in training.loader:
            pass
    for number, _ in enumerate(training.loader):  # a batch that is left out has a gradient of zeros
        training.optimizer.zero_grad()
        if number == 1:
            training.weight.sum().backward()
        training.optimizer.step()
        if training.optimizer.updated:
            break
    assert training.weight.tolist() == pytest.approx(2 * [-1e-3])


@alone
def test_refuses_what_does_not_fit(world: World) -> None:
    training = Training(world, "training")
    numbers = Numbers(100)

    def loader(**options: Any) -> DataLoader[float]:
        sampler = DynamicShardingSampler(100, 1, options.pop("passes", PASSES))
        return DataLoader(options.pop("dataset", numbers), batch_sampler=sampler, **options)

    def wrap(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD([training.weight], lr=0.1), **options)

    shared = {"backward_passes_per_step": PASSES, "sync": "work_sharing"}
    stepped = wrap(**shared)
    for _ in range(PASSES):
        stepped.step()
    passes = "backward_passes_per_step of the sampler must be 2, as of the optimizer, not 3"
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (
            DynamicShardingLoader,
            (DataLoader(numbers), wrap(**shared)),
            "loader must be a DataLoader with batch_sampler",
        ),
        (DynamicShardingLoader, (loader(passes=3), wrap(**shared)), passes),
        (
            DynamicShardingLoader,
            (loader(), torch.optim.SGD([training.weight])),
            "optimizer of DynamicShardingLoader must",
        ),
        (
            DynamicShardingLoader,
            (loader(dataset=Augmented(100), num_workers=1, persistent_workers=True), wrap(**shared)),
            "loader must be without persistent_workers, whose copies of the dataset get no set_epoch",
        ),
        (DynamicShardingLoader, (loader(), stepped), "the optimizer has taken steps without a DynamicShardingLoader"),
        (micro_batch_seed, (torch.optim.SGD([training.weight], lr=0.1),), "optimizer of micro_batch_seed must be"),
        (micro_batch_seed, (training.optimizer, 1.5), "base must be an int of 64 bits"),
    ]
    for call, arguments, text in cases:
        with pytest.raises(ValueError, match=text):
            call(*arguments)
