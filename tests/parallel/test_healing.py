"""After a flush there is one model, whatever a plain loop does around its steps."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.matrix import front_end
from harness.torch_training import Classifier
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = front_end

STEPS = 20
LONG = pytest.mark.full_matrix
POLICIES = [pytest.param("full", marks=LONG), "majority", "solo"]


class Loop(Classifier):
    """A small training, of which rank 0 is slow."""

    def __init__(self, world: World, policy: str, prefix: str = "", **options: Any) -> None:
        super().__init__(world, lambda parameters: torch.optim.Adam(parameters, lr=0.01), policy, prefix, **options)
        self.ends_with: Callable[[], None] = lambda: None

    def loss(self) -> torch.Tensor:
        if self.world.rank == 0:
            time.sleep(0.01)
        return super().loss()


def waits_after_steps(world: World, policy: str, wait: Callable[[torch.Tensor], Any]) -> list[Loop]:
    loop = Loop(world, policy)
    for step in range(STEPS):
        loss = loop.step()
        if step % 5 == 4:
            wait(loss)
    return [loop]


def averages_its_loss(world: World, policy: str) -> list[Loop]:
    return waits_after_steps(world, policy, lambda loss: hvd.allreduce(loss, name=world.name("loss")))


def averages_without_gradients(world: World, policy: str) -> list[Loop]:
    """What is made while the program evaluates is there for training."""

    @torch.inference_mode()
    def average(loss: torch.Tensor) -> None:
        hvd.allreduce(loss, name=world.name("loss"))

    return waits_after_steps(world, policy, average)


def asks_whether_its_loss_is_there(world: World, policy: str) -> list[Loop]:
    def ask(loss: torch.Tensor) -> None:
        handle = hvd.allreduce_async(loss, name=world.name("loss"))
        while not hvd.poll(handle):
            time.sleep(1e-3)
        hvd.synchronize(handle)

    return waits_after_steps(world, policy, ask)


def has_two_optimizers(world: World, policy: str) -> list[Loop]:
    """Each waits in its own rounds, while gradients of the other are under way; some ranks take more steps of one."""
    loops = [Loop(world, policy, "a."), Loop(world, policy, "b.")]
    for step in range(STEPS):
        for loop in loops:
            loop.backward()
        for loop in loops:
            loop.optimizer.step()
        if policy != "full" and step % 4 == world.rank:
            loops[0].step()
    return loops


def has_a_telemetry_thread(world: World, policy: str) -> list[Loop]:
    loop = Loop(world, policy)
    loop.step()
    name = world.name("telemetry")

    def report() -> None:
        for _ in range(3):
            hvd.allreduce(torch.zeros(1), name=name)
            time.sleep(0.02)

    thread = threading.Thread(target=report)
    if world.rank != 0:
        thread.start()
    for step in range(STEPS):
        if world.rank == 1 and step == STEPS // 2:
            time.sleep(0.3)  # much longer than its other steps
        loop.step()
        if world.rank == 0 and step == STEPS // 2:
            thread.start()  # until now those of the others have waited
    loop.ends_with = thread.join
    return [loop]


LOOPS: list[Callable[[World, str], list[Loop]]] = [
    averages_its_loss,
    averages_without_gradients,
    asks_whether_its_loss_is_there,
    has_two_optimizers,
    has_a_telemetry_thread,
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", LOOPS, ids=[run.__name__ for run in LOOPS])
def test_nothing_parts_the_replicas(world: World, run: Callable[[World, str], list[Loop]], policy: str) -> None:
    for loop in run(world, policy):
        loop.check()
        loop.ends_with()
    assert {of["summed"] for of in hvd.partial_stats().values()} <= {0}
    world.barrier()


def warms_up(loop: Loop) -> None:
    """A plain schedule counts this rank's steps."""
    schedule = torch.optim.lr_scheduler.LinearLR(loop.optimizer, 0.1, total_iters=STEPS)
    for _ in range(STEPS):
        loop.step()
        schedule.step()


def clamps(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.step()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.clamp_(-0.2 - 0.01 * loop.world.rank, 0.2)


def begins_with_another_model(loop: Loop) -> None:
    with torch.no_grad():
        loop.model[0].weight.add_(loop.world.rank)
    loop.step()


def freezes(loop: Loop) -> None:
    for step in range(STEPS):
        loop.model[2].requires_grad_(step < STEPS // 2)
        loop.step()


def parts_in_state(loop: Loop) -> None:
    for _ in range(STEPS):
        loop.step()
    loop.optimizer.flush()
    if loop.world.rank == 2:
        loop.optimizer.state[loop.model[0].bias]["exp_avg"].fill_(float("nan"))
        del loop.optimizer.state[loop.model[2].bias]["exp_avg_sq"]


PARTED: list[Callable[[Loop], None]] = [warms_up, clamps, begins_with_another_model, freezes, parts_in_state]


@pytest.mark.usefixtures("heals")
@pytest.mark.parametrize("policy", ["majority", pytest.param("solo", marks=pytest.mark.full_matrix)])
@pytest.mark.parametrize("part", PARTED, ids=[part.__name__ for part in PARTED])
def test_a_flush_heals(world: World, part: Callable[[Loop], None], policy: str) -> None:
    loop = Loop(world, policy)
    part(loop)
    loop.check()
    loop.step()
    loop.check()
    world.barrier()


# For each part of a training, which ends with a join: how many steps each rank makes in it.
JOINS: dict[str, Callable[[World], list[int]]] = {
    "unequal": lambda world: [4 + 8 * ((world.rank + part) % world.size) for part in range(3)],
    "one-joins-first": lambda world: [0 if world.rank == world.size - 1 else 12, 0 if world.rank == 0 else 6, 0],
    "nobody-steps": lambda world: [0, 3 + world.rank],
    "each-step": lambda world: [1] * 8,
}


@pytest.mark.parametrize("policy", ["majority", pytest.param("solo", marks=LONG), pytest.param("full", marks=LONG)])
@pytest.mark.parametrize("steps_of", JOINS.values(), ids=JOINS)
def test_one_model_after_a_join(world: World, steps_of: Callable[[World], list[int]], policy: str) -> None:
    """Programs of others join at the end of each epoch, as a barrier, and save what rank 0 has."""
    loop = Loop(world, policy)
    for steps in steps_of(world):
        for _ in range(steps):
            loop.step()
        world.same(hvd.join())
        if policy != "full":  # there a rank that has joined gets nothing, as with Horovod
            hvd.assert_replicas_equal(loop.model, loop.optimizer)
            world.same(loop.optimizer.rounds)
    loop.optimizer.flush()
    world.barrier()


def test_rounds_lost_before_a_broadcast_do_not_count(world: World) -> None:
    """Of two ranks that have lost rounds, the one whose replica was replaced since has the better one."""
    loop = Loop(world, "majority")
    for rank in (1, 2):
        for _ in range(4):
            loop.step()
        if world.rank == rank:
            loop.optimizer._exchange.family.disturb(1)
        if rank == 1:
            hvd.broadcast_parameters(loop.model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(loop.optimizer, root_rank=0)
    assert (loop.optimizer._exchange.family.lost > 0) == (world.rank == 2)
    hvd.broadcast_parameters(loop.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(loop.optimizer, root_rank=0)
    loop.check()
    world.barrier()


def test_a_broadcast_flushes_before(world: World) -> None:
    """What a rank had missed is not applied on top of the model that it gets."""
    loop = Loop(world, "solo")
    for _ in range(STEPS):
        loop.step()
    with torch.no_grad():
        loop.model[0].weight.fill_(world.rank)
    hvd.broadcast_parameters(loop.model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(loop.optimizer, root_rank=1)
    assert loop.optimizer.flushed()
    world.same(loop.model[0].weight.tolist())
    loop.check()
    world.barrier()


@pytest.mark.usefixtures("heals")
def test_what_parts_replicas_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(world, "majority")
    loop.step()
    loop.check()
    names = loop.optimizer._exchange.family.names
    assert hvd.partial_stats()[names[0]]["healed"] == 0
    if world.rank == 1:
        with torch.no_grad():
            loop.model[2].bias[1] += 0.25
    loop.check()
    assert {hvd.partial_stats()[name]["healed"] for name in names} == {1}
    if world.rank == 0:
        assert "rank(s) 1 differed from rank 0 in up to 1 of" in caplog.text
        assert "by up to 0.25; the first one of rank 1 was parameter 2.bias" in caplog.text
    loop.step()
    loop.check()
    assert hvd.partial_stats()[names[0]]["healed"] == 1
    world.barrier()


@pytest.mark.usefixtures("heals")
def test_ranks_that_begin_with_different_models_are_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """But not if a program only changes parameters between two backward passes, by each rank's own gradients."""
    for apart in (False, True):
        loop = Loop(world, "majority", backward_passes_per_step=2)
        weight = loop.model[0].weight.data
        weight += apart * world.rank
        for _ in range(3):
            loop.loss().backward()
            kept = weight.clone()
            weight += world.rank
            loop.loss().backward()
            weight.copy_(kept)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        told = "the parameters of rank(s) 1, 2, 3 are not those of rank 0" in caplog.text
        assert told == (apart and world.rank == 0)
        loop.check()
    world.barrier()


def test_replicas_that_part_raise_where_they_shall(world: World) -> None:
    loop = Loop(world, "majority")
    loop.step()
    if world.rank == 1:
        loop.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="the learning rates, or other numbers, of rank 0 were not those of all"):
        loop.optimizer.flush()
    world.barrier()


class Average(torch.nn.Module):
    """A moving average of a model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros_like(model[0].weight))  # type: ignore[index]
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))


@pytest.mark.usefixtures("heals")
def test_what_follows_rounds_is_healed_too(world: World) -> None:
    loop = Loop(world, "majority")
    average = Average(loop.model)

    @torch.no_grad()
    def follow(_: torch.optim.Optimizer) -> None:
        average.mean.lerp_(loop.model[0].weight, 0.1)
        average.rounds += 1

    loop.optimizer.register_round_hook(follow, state=average)
    for _ in range(STEPS):
        loop.step()
    loop.check()
    world.same([value.tolist() for value in average.state_dict().values()])
    if world.rank == 0:
        average.mean.data.add_(1.0)
    loop.check()
    world.same([value.tolist() for value in average.state_dict().values()])
    world.barrier()


class Scaled(torch.Tensor):
    """Made of two other tensors, like the states of optimizers that keep them in 8 bits. Nothing else works with it."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.shape]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(function)


class Collector(torch.optim.SGD):
    """Has states of many kinds."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            scaled = Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.ones(1))
            quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
            self.state[parameter] = {
                "scaled": scaled,
                "expanded": torch.zeros(1).expand(3),
                "turned": torch.tensor([1 + 2j]).conj(),
                "empty": torch.zeros(0, 3),
                "sparse": torch.eye(2).to_sparse(),
                "listed": [torch.zeros(1), quantized],
            }


@pytest.mark.usefixtures("heals")
def test_states_of_all_kinds(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """What can be sent is healed, also where there is nothing yet, and what cannot is left as it is, and told once."""
    weight, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(0, 2))
    optimizer: Any = hvd.DistributedOptimizer(
        Collector([weight, empty], lr=0.1), [("weight", weight), ("empty", empty)], sync="majority"
    )
    (weight.sum() + empty.sum()).backward()
    optimizer.step()
    state, other = optimizer.state[weight], optimizer.state[empty]
    codes = state["scaled"].codes
    if world.rank == 1:
        weight.data += 1
        codes += 1
        state |= {
            "expanded": torch.ones(1).expand(3),
            "turned": torch.tensor([3 + 4j]).conj(),
            "sparse": 2 * state["sparse"],
        }
        state["listed"][0] += 1
        del other["scaled"]
    for _ in range(2):
        optimizer.flush()
    assert state["scaled"].codes is codes
    for scaled in (state["scaled"], other["scaled"]):
        world.same([scaled.codes.tolist(), scaled.scale.tolist()])
    world.same([weight.tolist(), state["expanded"].tolist(), state["turned"].tolist()])
    own = 2.0 if world.rank == 1 else 1.0
    assert [state["sparse"].to_dense()[0, 0].item(), state["listed"][0].item()] == [own, own - 1]
    assert {hvd.partial_stats()[name]["healed"] for name in optimizer._exchange.family.names} == {1}
    assert caplog.text.count("nor heal the state weight sparse") == 1
    assert "a value like this cannot be sent: Tensor torch.float32 torch.sparse_coo" in caplog.text
    world.barrier()


def test_rounds_that_are_lost_before_the_first_count_are_counted(world: World) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync="quorum:1.0")
    weight.sum().backward()
    optimizer.step()
    family = optimizer._exchange.family
    family.disturb(2)
    assert family.lost == 2
    family.disturb(1)
    assert family.lost == 3
    family.count_anew()
    assert family.lost == 0
    world.barrier()
