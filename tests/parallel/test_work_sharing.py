"""`sync=hvd.WorkSharing()`: the micro-batches of an update belong to all ranks (docs/protocol.md, rule 17)."""

import contextlib
import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness.matrix import OVER_MPI, alone
from harness.torch_training import take_step, weights
from harness.world import World, delay
from horovod.common.exceptions import HorovodInternalError

import horovod_partial.torch as hvd
from horovod_partial.runtime import healing
from horovod_partial.torch.operations import runtime

pytestmark = pytest.mark.launch(**OVER_MPI, full_ranks=(2, 3, 4, 8))

PASSES = 2
UPDATES = 4

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def loss_of(model: torch.nn.Module, update: int, number: int) -> torch.Tensor:
    """Of one micro-batch, whichever rank makes it."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * update + number)
    x, y = (torch.randn(4, n, generator=generator, dtype=torch.double) for n in (6, 1))
    loss: torch.Tensor = ((model(x) - y) ** 2).mean() / PASSES
    return loss


def wrap(model: torch.nn.Module, make: Make = OPTIMIZERS["adamw"], **options: Any) -> Any:
    arguments = {"backward_passes_per_step": PASSES, "sync": "work_sharing"} | options
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **arguments)


def wrapped(make: Make = OPTIMIZERS["adamw"], **options: Any) -> tuple[torch.nn.Sequential, Any]:
    """A model and its distributed optimizer."""
    model = make_model()
    return model, wrap(model, make, **options)


def counting(dtype: torch.dtype = torch.float32, passes: int = PASSES, **options: Any) -> tuple[torch.Tensor, Any]:
    """A weight that falls by the number of all micro-batches, and its optimizer."""
    weight = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    arguments = {"op": hvd.Sum, "backward_passes_per_step": passes, "sync": hvd.WorkSharing()} | options
    return weight, hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **arguments)


def count(weight: torch.Tensor, optimizer: Any) -> None:
    """A micro-batch."""
    take_step(optimizer, weight.sum)


def train(world: World, model: torch.nn.Module, optimizer: Any, label: str = "", updates: int = UPDATES) -> int:
    """Rank 1 is slow, but in the first update: it ends a micro-batch when the others have made all that are left.

    Returns how many this rank has made.
    """
    made = 0
    until = optimizer.rounds + updates
    while optimizer.rounds < until:
        update, number = optimizer.begin_micro_batch()
        optimizer.zero_grad()
        loss = loss_of(model, update, number)
        if world.rank == 1 and update > 0:
            for other in range(PASSES * world.size):
                if other != number:
                    world.wait_for(f"{label}.{update}.{other}")
        loss.backward()
        world.tell(f"{label}.{update}.{number}")
        optimizer.step()  # waits where nothing is left to make
        made += 1
    return made


def reference(
    world: World,
    make: Make = OPTIMIZERS["adamw"],
    before: Callable[[torch.nn.Module], Any] | None = None,
    after: Callable[[torch.nn.Module], Any] | None = None,
    updates: int = UPDATES,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What one process makes of all micro-batches: the mean over ranks of sums over passes, as with Horovod."""
    model = make_model()
    optimizer = make(model.parameters())
    for update in range(updates):
        optimizer.zero_grad()
        for number in range(PASSES * world.size):
            (loss_of(model, update, number) / world.size).backward()
        if before is not None:
            before(model)
        optimizer.step()
        if after is not None:
            after(model)
    return model, optimizer


def state_of(optimizer: torch.optim.Optimizer) -> list[float]:
    values = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    numbers: list[float] = torch.cat([value.double().reshape(-1) for value in values]).tolist() if values else []
    return numbers


# --- One model, that of synchronous training


def test_updates_are_those_of_synchronous_training(world: World) -> None:
    """With every optimizer of PyTorch: parameters after each update, and the state at the end."""
    for name, make in OPTIMIZERS.items():
        model, optimizer = wrapped(make)
        seen: list[list[float]] = []
        optimizer.register_round_hook(lambda _, model=model, seen=seen: seen.append(weights(model)))
        made = train(world, model, optimizer, name)
        expected: list[list[float]] = []
        _, plain = reference(world, make, after=lambda model, expected=expected: expected.append(weights(model)))
        assert len(seen) == UPDATES
        for update in range(UPDATES):
            assert world.same(seen[update]) == pytest.approx(expected[update], abs=1e-9), name
        assert state_of(optimizer) == pytest.approx(state_of(plain), abs=1e-9), name
        numbers = world.gather(made)
        assert sum(numbers) == UPDATES * PASSES * world.size
        stats = hvd.partial_stats()[optimizer._exchange.buckets[0].name]
        assert (stats["gradients"], stats["rounds"]) == (numbers, UPDATES)
        if world.rank == 1:
            assert made <= PASSES + UPDATES - 1  # its share of the first update, then one of each at most
        hvd.assert_replicas_equal(model, optimizer)
        del optimizer


def test_clipping_schedules_and_averages_follow_updates(world: World) -> None:
    model, optimizer = wrapped(max_grad_norm=0.1)
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1))
    average = copy.deepcopy(model)

    def moves(average: torch.nn.Module, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for own, new in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(new, 0.5)

    optimizer.register_round_hook(lambda _: moves(average, model), state=average)
    train(world, model, optimizer)
    expected_average = make_model()
    plain: list[torch.optim.lr_scheduler.StepLR] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS["adamw"](parameters)
        plain.append(torch.optim.lr_scheduler.StepLR(made, 2, 0.1))
        return made

    def after(model: torch.nn.Module) -> None:
        plain[0].step()
        moves(expected_average, model)

    clip = lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected, _ = reference(world, make, before=clip, after=after)
    assert weights(model) == pytest.approx(weights(expected), abs=1e-9)
    assert weights(average) == pytest.approx(weights(expected_average), abs=1e-9)
    assert schedule.get_last_lr() == plain[0].get_last_lr()
    optimizer.flush()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)  # of the last update, for who logs norms after step()


def test_a_micro_batch_that_overflows_is_skipped_with_its_update(world: World) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0)
    optimizer = wrap(model, grad_scaler=scaler)
    while optimizer.rounds < UPDATES:
        update, number = optimizer.begin_micro_batch()
        optimizer.zero_grad()
        loss = loss_of(model, update, number)
        scaler.scale(loss * float("inf") if (update, number) == (1, 2) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert world.same(scaler.get_scale()) == 512.0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert [int(state["step"]) for state in optimizer.state.values()] == [UPDATES - 1] * 4
    hvd.assert_replicas_equal(model, optimizer)


@pytest.mark.parametrize("compression", ["fp16", "bfloat16"])
def test_what_travels_may_be_of_another_type(world: World, compression: str) -> None:
    dtype = torch.bfloat16 if compression == "bfloat16" else torch.float32
    chosen = hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none
    weight, optimizer = counting(dtype, compression=chosen)
    while optimizer.rounds < 2:
        count(weight, optimizer)
    assert weight.tolist() == [-2.0 * PASSES * world.size] * 3


def test_random_delays(world: World) -> None:
    """Each micro-batch is in one update, once."""
    rng = world.random()
    rng.seed(rng.randrange(2**32) + world.rank)
    weight, optimizer = counting(passes=3)
    made = []
    while optimizer.rounds < (200 if world.long else 30):
        made.append(optimizer.begin_micro_batch())
        delay(rng)
        count(weight, optimizer)
    everything = sorted(each for rank in world.gather(made) for each in rank)
    updates = optimizer.rounds
    assert everything == [(update, number) for update in range(updates) for number in range(3 * world.size)]
    assert weight.tolist() == [-3.0 * updates * world.size] * 3


def test_a_round_hook_that_fails(world: World) -> None:
    """Its update has been applied, and none of its gradients are in the next one, which zero_grad() need not prevent."""
    weight, optimizer = counting()
    failures = [ValueError("planned")]

    def fail_once(_: Any) -> None:
        if failures:
            raise failures.pop()

    optimizer.register_round_hook(fail_once)
    while optimizer.rounds < 3:
        optimizer.begin_micro_batch()
        weight.sum().backward()
        with contextlib.suppress(ValueError):
            optimizer.step()
    assert not failures
    assert weight.grad is not None
    assert weight.grad.tolist() == [PASSES * world.size] * 3
    assert weight.tolist() == [-3.0 * PASSES * world.size] * 3


def test_several_losses_in_a_micro_batch(world: World) -> None:
    """Of a GAN: one optimizer has the parameters of both, and no parameter has gradients of two losses."""

    def make() -> torch.nn.ModuleList:
        return torch.nn.ModuleList([make_model(), torch.nn.Linear(1, 1).double()])

    def backward(model: torch.nn.ModuleList, update: int, number: int, divisor: float, frozen: bool = True) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(1000 * update + number)
        made = model[0](torch.randn(4, 6, generator=generator, dtype=torch.double))
        (model[1](made.detach()).square().mean() / divisor).backward()
        model[1].requires_grad_(not frozen)
        (-model[1](made).mean() / divisor).backward()
        model[1].requires_grad_(True)

    models = make(), make()
    for module in models:
        torch.nn.init.constant_(module[1].weight, 0.5)
        torch.nn.init.constant_(module[1].bias, 0.1)
    model, expected = models
    optimizer = wrap(model)
    while optimizer.rounds < UPDATES:
        backward(model, *optimizer.begin_micro_batch(), PASSES)
        optimizer.step()
    plain = OPTIMIZERS["adamw"](expected.parameters())
    for update in range(UPDATES):
        plain.zero_grad()
        for number in range(PASSES * world.size):
            backward(expected, update, number, PASSES * world.size)
        plain.step()
    assert weights(model) == pytest.approx(weights(expected), abs=1e-9)
    optimizer.flush()
    twice = r"gradients of 1\.\w+ were computed twice before step.*requires_grad_\(False\)"
    with pytest.raises(AssertionError, match=twice):
        backward(model, *optimizer.begin_micro_batch(), PASSES, frozen=False)


# --- Loops end, flush, save


def test_ranks_with_unequal_data(world: World) -> None:
    """Whose data have ended waits in a flush; an update has too few micro-batches only when all data have."""
    weight, optimizer = counting()
    for _ in range(5 + 4 * world.rank):
        count(weight, optimizer)
    optimizer.flush()
    assert weight.tolist() == [-float(sum(5 + 4 * rank for rank in world.ranks))] * 3
    hvd.assert_replicas_equal(torch.nn.ParameterList([weight]), optimizer)


def test_a_rank_that_comes_late_from_a_flush(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others make no update without it: its flush would apply that, and its model be newer than theirs was."""
    compare = healing.compare

    def return_late(*arguments: Any) -> None:
        compare(*arguments)
        if world.rank == 0:
            time.sleep(0.5)

    monkeypatch.setattr(healing, "compare", return_late)
    model, optimizer = wrapped()
    train(world, model, optimizer, updates=1)
    optimizer.flush()
    flushed = weights(model)
    train(world, model, optimizer, "then", updates=1)
    world.same(flushed)


@pytest.mark.usefixtures("heals")
def test_a_join(world: World) -> None:
    """Who has joined misses the others' updates, as with Horovod, until the next flush."""
    weight, optimizer = counting()
    for _ in range(4 + 3 * world.rank):
        count(weight, optimizer)
    hvd.join()
    optimizer.flush()
    hvd.assert_replicas_equal(torch.nn.ParameterList([weight]), optimizer)


def test_a_join_before_any_step(world: World) -> None:
    """Each rank returns the micro-batch that it has begun, and begins it again."""
    weight, optimizer = counting()
    optimizer.begin_micro_batch()
    hvd.join()
    while optimizer.rounds < 2:
        count(weight, optimizer)
    assert weight.tolist() == [-2.0 * PASSES * world.size] * 3


def test_a_join_of_who_keeps_an_optimizer_that_the_others_have_deleted(world: World) -> None:
    """Python may free it at another time on each rank. Its buckets end while rank 0 is in its join."""
    weight, optimizer = counting()
    while optimizer.rounds < 2:
        count(weight, optimizer)
    optimizer.flush()
    if world.rank > 0:
        name = optimizer._exchange.buckets[0].name
        del optimizer
        world.until(lambda: name not in hvd.partial_stats(), "the buckets have ended")
    hvd.join()
    if world.rank == 0:
        assert optimizer.rounds == 2
    world.barrier()


@pytest.mark.parametrize("ends", [hvd.flush, hvd.join], ids=["flush", "join"])
@pytest.mark.usefixtures("heals")
def test_another_thread_flushes(world: World, ends: Callable[[], Any]) -> None:
    """That of the training lives on, and is idle: what it has begun is given back. It may train on."""
    weight, optimizer = counting(passes=3)
    data = 5 + world.rank

    def train() -> None:
        for _ in range(data):
            count(weight, optimizer)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(train).result()
            ends()
            if ends is hvd.join:
                hvd.flush()
            world.same(weight.tolist())
        if ends is hvd.flush:
            assert weight.tolist() == [-2.0 * sum(world.gather(data))] * 3
            pool.submit(lambda: weight.sum().backward()).result()
            with pytest.raises(AssertionError, match=r"before optimizer.step\(\) of this or another thread"):
                hvd.flush()
            optimizer.step()
            hvd.flush()


def test_a_flush_closes_an_update_early(world: World) -> None:
    model, optimizer = wrapped()
    train(world, model, optimizer, updates=2)
    number = 0
    if world.rank == 0:  # one micro-batch of six
        update, number = optimizer.begin_micro_batch()
        loss_of(model, update, number).backward()
        for call in (optimizer.flush, optimizer.zero_grad):
            with pytest.raises(AssertionError, match=r"after loss.backward\(\) but before"):
                call()
        optimizer.step()
        with pytest.raises(AssertionError, match="within an update"):
            optimizer.load_state_dict(optimizer.state_dict())
    optimizer.flush()
    expected, plain = reference(world, updates=2)
    plain.zero_grad()
    (loss_of(expected, 2, world.gather(number)[0]) / world.size).backward()
    plain.step()
    assert weights(model) == pytest.approx(weights(expected), abs=1e-9)
    assert world.same(optimizer.rounds) == 3
    train(world, model, optimizer, "then", updates=1)
    hvd.assert_replicas_equal(model, optimizer)


def test_a_checkpoint_is_taken_up(world: World) -> None:
    model, optimizer = wrapped()
    train(world, model, optimizer, updates=2)
    optimizer.flush()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(world, model, optimizer, "on", updates=2)
    optimizer.flush()
    other, again = wrapped()
    del optimizer
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    while again.rounds < 2:  # the same micro-batches, by other numbers of updates
        update, number = again.begin_micro_batch()
        loss_of(other, 2 + update, number).backward()
        again.step()
    assert weights(other) == pytest.approx(weights(model), abs=1e-9)


# --- Which parameters


def test_parameters_without_gradients(world: World) -> None:
    """What a micro-batch does not use counts as zeros there, and is in the update if another one uses it."""
    used, rare = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, rare], lr=1.0), op=hvd.Sum, backward_passes_per_step=PASSES, sync="work_sharing"
    )
    while optimizer.rounds < 2:
        _, number = optimizer.begin_micro_batch()
        (used.sum() + (rare.sum() if number == 1 else 0)).backward()
        optimizer.step()
    assert used.tolist() == [-2.0 * PASSES * world.size] * 3
    assert rare.tolist() == [-2.0] * 3


def test_layers_that_are_frozen(world: World) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = wrap(model)
    train(world, model, optimizer, updates=2)
    assert torch.equal(model[0].weight, before)
    optimizer.flush()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="needs gradients now"):
        optimizer.step()
    optimizer = wrap(model)
    train(world, model, optimizer, "unfrozen", updates=2)
    assert not torch.equal(model[0].weight, before)
    hvd.assert_replicas_equal(model, optimizer)


@alone
def test_one_rank(world: World) -> None:
    model, optimizer = wrapped()
    updated = []
    for _ in range(2 * UPDATES):
        update, number = optimizer.begin_micro_batch()
        loss_of(model, update, number).backward()
        optimizer.step()
        updated.append(optimizer.updated)
        assert (model[0].weight.grad is not None) == optimizer.updated
        optimizer.zero_grad()
    assert updated == [0, 1] * UPDATES
    assert weights(model) == pytest.approx(weights(reference(world)[0]), abs=1e-9)
    optimizer.flush()
    assert optimizer.rounds == UPDATES


# --- What is refused


def test_two_optimizers_at_a_time(world: World) -> None:
    (first, one), (second, other) = wrapped(), wrapped()
    train(world, first, one, "first", updates=1)
    train(world, second, other, "second", updates=1)  # one phase after the other
    with pytest.raises(ValueError, match="two optimizers cannot share work in turns"):
        loss_of(first, 0, 0).backward()
    other.flush()
    hvd.assert_replicas_equal(second, other)


def test_a_backward_that_fails_before_any_arrival(world: World) -> None:
    """The optimizer is given up, and another one is wrapped: nothing is left that a flush would wait for."""
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    torch.nn.init.zeros_(embedding.weight)
    make = lambda parameters: torch.optim.SGD(parameters, 1.0)
    optimizer = wrap(embedding, make, op=hvd.Sum)
    with pytest.raises(ValueError, match="buckets cannot hold sparse gradients"):
        embedding(torch.tensor([0])).sum().backward()
    del optimizer
    optimizer = wrap(embedding, make, op=hvd.Sum, sparse_as_dense=True)
    for _ in range(3 * PASSES):
        optimizer.zero_grad()
        embedding(torch.tensor([0])).sum().backward()
        optimizer.step()
    optimizer.flush()
    assert embedding.weight[0].tolist() == [-3.0 * PASSES * world.size] * 2


def test_a_declaration_that_fails_is_made_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush before that begins no micro-batch."""

    def fail(*_: Any) -> None:
        raise OSError("planned")

    weight, optimizer = counting()
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "declare", fail)
        with pytest.raises(OSError, match="planned"):
            count(weight, optimizer)
    hvd.flush()
    while optimizer.rounds < 2:
        count(weight, optimizer)
    assert weight.tolist() == [-2.0 * PASSES * world.size] * 3


def test_ranks_that_disagree(world: World) -> None:
    weight, optimizer = counting(passes=2 + world.rank % 2)
    with pytest.raises(HorovodInternalError, match="backward_passes_per_step=2"):  # noqa: PT012
        for _ in range(4):
            count(weight, optimizer)


@alone
def test_what_does_not_fit(world: World) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"merging cannot be used with hvd\.WorkSharing\(\)"):
        wrap(model, merging=hvd.MergedGradients())
    with pytest.raises(ValueError, match=r"is for hvd\.DistributedOptimizer in PyTorch"):
        hvd.partial_allreduce(torch.ones(2), name="x", sync=hvd.WorkSharing())
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match="nothing to wait for"):
        optimizer.synchronize()
    with pytest.raises(ValueError, match="cannot change under"):
        optimizer.set_backward_passes_per_step(3)
    loss_of(model, 0, 0).backward()
    with pytest.raises(AssertionError, match="computed twice before step"):
        loss_of(model, 0, 1).backward()
    with pytest.raises(RuntimeError, match="gradients were changed after backward"):
        optimizer.step()
    loss_of(model, 0, 1).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="max_grad_norm="):
        optimizer.step()
    with pytest.raises(ValueError, match="needs sync="):
        wrap(make_model(), sync="solo").begin_micro_batch()
