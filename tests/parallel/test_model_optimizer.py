"""`hvd.DistributedOptimizer` under policies of models: a local step, then an average of what the ranks have.

Forms of training that all policies have are in `test_optimizer.py`, and `test_conformance_model_optimizer.py` has what
PyTorch shares with Keras.
"""

import copy
import time
from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.matrix import alone, front_end
from harness.torch_training import (
    KINDS,
    MAKERS,
    MODELS,
    check_replicas,
    loss_of,
    make_model,
    state,
    take_step,
    train,
    weights,
    wrap,
    wrapped,
)
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = front_end

EVERYTHING = ("parameters", "buffers", "state")
policies = pytest.mark.parametrize("policy", MODELS)
kinds = pytest.mark.parametrize("policy", KINDS)


def buffers(model: torch.nn.Module) -> list[float]:
    return [number for b in model.buffers() if b.dtype.is_floating_point for number in b.reshape(-1).tolist()]


def learns(world: World, model: torch.nn.Module, bare: torch.optim.Optimizer, steps: int, **options: Any) -> Any:
    """Train a linear model: its loss falls, and there is one model in the end; returns the optimizer."""
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    target = torch.tensor([[1.0, -2.0, 3.0]])

    def loss() -> torch.Tensor:
        x = torch.randn(32, 3)
        return ((model(x) - x @ target.T) ** 2).mean()

    losses = [take_step(optimizer, loss).item() for _ in range(steps)]
    optimizer.flush()
    assert sum(losses[-20:]) / 20 < 0.25 * losses[0]
    world.same((weights(model), buffers(model)))
    return optimizer


@pytest.mark.parametrize("make", ["adam", pytest.param("momentum", marks=pytest.mark.full_matrix)])
@policies
def test_learns(world: World, policy: str, make: str) -> None:
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False), torch.nn.Linear(3, 1))
    adam = make == "adam"
    parameters = model.parameters()
    bare = torch.optim.Adam(parameters, lr=0.05) if adam else torch.optim.SGD(parameters, lr=0.05, momentum=0.5)
    sync = MODELS[policy](average=EVERYTHING if adam else ("parameters", "buffers"))
    optimizer = learns(world, model, bare, 120, sync=sync, named_buffers=model.named_buffers())
    if adam:
        world.same(state(optimizer, model))
        assert all(optimizer.state[p]["step"] == 120 for p in model.parameters())  # a counter stays the rank's own


@policies
def test_flush_averages_over_all_ranks(world: World, policy: str) -> None:
    """The models are equal, and their mean is what it was."""
    model = make_model()
    optimizer = wrap(model, MODELS[policy](average=("parameters", "buffers")), named_buffers=model.named_buffers())
    # Fewer steps than a period of `weighted`, whose flush weighs models by the steps that each rank took in its period.
    train(world, optimizer, model, 2)
    hvd.barrier()  # who is through waits here, so that ranks that are left over do not wait for it
    everybody = world.gather((weights(model), buffers(model)))
    for _ in range(3):  # the later ones change nothing
        optimizer.flush()
        optimizer.flush()
        after = world.same((weights(model), buffers(model)))
        for i in range(2):
            means = torch.tensor([mine[i] for mine in everybody], dtype=torch.float64).mean(0)
            assert after[i] == pytest.approx(means.tolist(), abs=1e-6)
    train(world, optimizer, model, 2, first=10)
    check_replicas(world, model, optimizer)


def test_a_flush_before_there_is_state(world: World) -> None:
    model = make_model(seed=world.rank)
    optimizer = wrap(model, hvd.GroupAverage(2, average=("parameters", "state")))
    for step in range(2):
        optimizer.flush()
        world.same((weights(model), [state["momentum_buffer"].tolist() for state in optimizer.state.values()]))
        train(world, optimizer, model, 2, first=2 * step)
    optimizer.flush()


@kinds
def test_backward_passes_per_step(world: World, policy: str) -> None:
    """Gradients accumulate on their rank; a step is an average, however many passes it has."""
    model, optimizer = wrapped(MODELS[policy](), backward_passes_per_step=2)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, world.rank, 2 * step + part).backward()
        optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    train(world, optimizer, model, 2, first=8)
    check_replicas(world, model, optimizer)


@kinds
def test_hooks_of_a_step_run_once(world: World, policy: str) -> None:
    model, optimizer = wrapped(MODELS[policy]())
    ran = []
    optimizer.register_step_pre_hook(lambda *arguments: ran.append("before"))
    optimizer.register_step_post_hook(lambda *arguments: ran.append("after"))
    train(world, optimizer, model, 2)
    assert ran == ["before", "after"] * 2
    optimizer.flush()


# --- Overlap ------------------------------------------------------------------------------------------------------------


def overlapping(policy: str, overlap: bool | str) -> Any:
    """A policy that averages in each step."""
    return hvd.WeightedAverage(1, 1.0, overlap=overlap) if policy == "weighted" else MODELS[policy](overlap=overlap)


@kinds
def test_a_gradient_beside_an_average_is_applied_to_it(world: World, policy: str) -> None:
    """A gradient is of the model before the average, which comes at the next step, a flush, or when it is waited for."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(world.rank))
    optimizer = wrap(model, overlapping(policy, "gradient"), "sgd")
    expected = float(world.rank)
    for number in range(12):
        before = model.weight.item()
        assert before == pytest.approx(expected)
        optimizer.zero_grad()
        (0.5 * model(torch.ones(1)) ** 2).backward()  # the gradient is the weight
        assert model.weight.item() == before
        world.barrier()  # all take part in each round, so the one before has ended
        optimizer.synchronize()
        averaged = model.weight.item()
        if number == 1 and policy != "ready":
            assert averaged == pytest.approx(0.9 * sum(world.ranks) / world.size)  # the first round is of all ranks
        optimizer.step()
        expected = averaged - 0.1 * before
    check_replicas(world, model, optimizer)


@policies
def test_learns_beside_averages(world: World, policy: str) -> None:
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(3, 1)
    bare = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    sync = MODELS[policy](average=("parameters", "state"), overlap="gradient")
    learns(world, model, bare, 80 + 5 * world.rank, sync=sync, max_grad_norm=10.0)  # some end earlier


overlaps = pytest.mark.parametrize("overlap", [True, "gradient"])


@pytest.mark.parametrize("way", ["no_grad", "data", "in place"])
@overlaps
@kinds
@pytest.mark.one_in(4)
def test_a_change_that_an_average_would_overwrite(world: World, policy: str, overlap: bool | str, way: str) -> None:
    model, optimizer = wrapped(overlapping(policy, overlap), "sgd")

    def clamp() -> None:
        weight = model[0].weight
        if way == "no_grad":
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
        elif way == "data":
            weight.data.clamp_(-0.1, 0.1)
        else:  # Horovod writes into the tensor's memory
            hvd.allreduce_(weight.data, name=world.name())

    train(world, optimizer, model, 2)
    optimizer.synchronize()
    clamp()
    train(world, optimizer, model, 2 + (policy == "weighted"))
    clamp()
    refusal = r"^0.weight was changed between a step .* call optimizer.synchronize\(\) before"
    with pytest.raises(RuntimeError, match=refusal):
        optimizer.synchronize()
    check_replicas(world, model, optimizer)


@overlaps
@kinds
def test_a_state_that_is_loaded_beside_an_average(world: World, policy: str, overlap: bool | str) -> None:
    """Training goes back to what was saved, and the average that was under way changes nothing."""
    model, optimizer = wrapped(overlapping(policy, overlap))
    train(world, optimizer, model, 2)
    optimizer.flush()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    kept = weights(model)
    train(world, optimizer, model, 2)
    world.barrier()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert weights(model) == kept
    train(world, optimizer, model, 2)
    check_replicas(world, model, optimizer)


@overlaps
@kinds
def test_a_state_that_one_rank_loads_beside_an_average(world: World, policy: str, overlap: bool | str) -> None:
    """Horovod's usual way to resume: rank 0 reads the file and broadcasts."""
    model, optimizer = wrapped(overlapping(policy, overlap))
    train(world, optimizer, model, 2)
    saved = make_model(seed=5).state_dict()
    if world.rank == 0:
        model.load_state_dict(saved)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    train(world, optimizer, model, 2)
    check_replicas(world, model, optimizer)


@pytest.mark.parametrize("then", ["flush", "join", "a new optimizer"])
@overlaps
@kinds
@pytest.mark.one_in(4)
def test_what_comes_after_an_average_finds_it(world: World, policy: str, overlap: bool | str, then: str) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(world.rank))
    sync = hvd.PartialReduce(world.size, overlap=overlap) if policy == "ready" else overlapping(policy, overlap)
    optimizer = wrap(model, sync, "sgd")
    optimizer.zero_grad()
    optimizer.step()  # all ranks are in the first round
    if then == "flush":
        hvd.flush()
    elif then == "join":
        hvd.join()
    else:
        wrap(model, hvd.Full(), "sgd")
    assert model.weight.item() == pytest.approx(sum(world.ranks) / world.size)


@overlaps
def test_optimizers_that_average_the_same_buffers(world: World, overlap: bool | str) -> None:
    model = make_model()
    average = ("parameters",) if overlap == "gradient" else ("parameters", "buffers")
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=0.1),
            layer.named_parameters(prefix=str(number)),
            sync=hvd.GroupAverage(2, average=average, overlap=overlap),
            named_buffers=model.named_buffers(),
        )
        for number, layer in enumerate((model[0], model[3]))
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.flush()
    world.same(weights(model))


# --- State ------------------------------------------------------------------------------------------------------------


@kinds
def test_a_state_that_is_loaded_before_the_first_step(world: World, policy: str) -> None:
    source = make_model()
    bare = MAKERS["adam"](source)
    loss_of(source, 0, 0).backward()
    bare.step()
    model, optimizer = wrapped(MODELS[policy](average=("parameters", "state")), "adam")
    optimizer.load_state_dict(bare.state_dict())
    assert state(optimizer, model) == state(bare, source)
    train(world, optimizer, model, 3)
    optimizer.flush()
    world.same((weights(model), state(optimizer, model)))


@alone
@kinds
def test_buffers_need_their_names(world: World, policy: str) -> None:
    model = make_model()
    sync = MODELS[policy](average=("parameters", "buffers"))
    with pytest.raises(ValueError, match=r"named_buffers=model.named_buffers\(\)"):
        wrap(model, sync)
    wrap(model, sync, named_buffers=model.named_buffers())
    wrap(model, sync, named_buffers=[])  # there may be none


@kinds
@pytest.mark.parametrize("freezes", [True, False])
def test_layers_that_change(world: World, policy: str, freezes: bool) -> None:
    model = make_model()
    model[0].weight.requires_grad_(freezes)
    optimizer = wrap(model, MODELS[policy]())
    train(world, optimizer, model, 4)
    optimizer.flush()
    model[0].weight.requires_grad_(not freezes)
    model[0].weight.grad = None
    refusal = "0.weight was frozen or unfrozen .* then wrap an optimizer of what is trained"
    with pytest.raises(RuntimeError, match=refusal):
        train(world, optimizer, model, 1)
    before = model[0].weight.clone()
    optimizer = wrap(model, MODELS[policy]())
    train(world, optimizer, model, 4)
    check_replicas(world, model, optimizer)
    assert torch.equal(model[0].weight, before) is freezes


def test_after_a_flush_no_older_model_stands_in(world: World) -> None:
    model, optimizer = wrapped(hvd.GroupAverage(2, period=None), "sgd")
    train(world, optimizer, model, 1)
    world.barrier()
    if world.rank == 1:
        world.until(lambda: completed(optimizer._exchange.name) >= 4, "the others' rounds have ended here")
    else:
        train(world, optimizer, model, 3, first=1)
    optimizer.flush()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(4.0)
    if world.rank == 1:
        time.sleep(0.2)
    for _ in range(3):
        take_step(optimizer, lambda: loss_of(model, world.rank, 0) * 0.0)
        assert set(weights(model)) == {4.0}
    world.barrier()


@kinds
def test_parameter_groups_that_are_added_are_averaged(world: World, policy: str) -> None:
    model, optimizer = wrapped(MODELS[policy]())
    train(world, optimizer, model, 2)
    added = torch.nn.Parameter(torch.full((1,), float(world.rank)))
    optimizer.add_param_group({"params": [added]})
    train(world, optimizer, model, 2)
    optimizer.flush()
    assert 0 < world.same(added.item()) < world.size - 1


def test_periods_that_differ_are_found_with_the_first_average(world: World) -> None:
    own, others = hvd.WeightedAverage(2, 0.9), hvd.WeightedAverage(1, 0.9)
    model, optimizer = wrapped(own if world.rank == 1 else others)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        train(world, optimizer, model, 2)
    text = world.same(str(caught.value))
    assert all(part in text for part in ("Mismatched sync policies", "rank 0", "rank 1", repr(own), repr(others))), text
