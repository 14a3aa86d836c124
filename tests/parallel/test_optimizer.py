"""`hvd.DistributedOptimizer` under partial policies: every form of training that PyTorch's users know."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import horovod.torch
import pytest
import torch
from harness.world import World

import horovod_partial.torch as hvd

EVERYBODY = "quorum:1.0"  # a partial policy under which every rank is on time: results are those of `Full()`
ALL = ["full", "solo", "majority", EVERYBODY]


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return torch.nn.functional.mse_loss(model(x), y)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def reference(
    world: World, make: Callable[[torch.nn.Module], torch.optim.Optimizer], steps: int, passes: int = 1
) -> Any:
    """The weights after training one model on all ranks' batches, without Horovod."""
    model = make_model()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in world.ranks:
            for part in range(passes):
                (loss_of(model, rank, passes * step + part) / world.size).backward()
        optimizer.step()
    return weights(model)


def train(world: World, optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()


MAKERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": sgd,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw-groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "weight_decay": 0.1}], lr=0.01
    ),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("policy", ["full", EVERYBODY])
def test_trains_as_one_process_would(world: World, policy: str, make: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS[make](model), model.named_parameters(), sync=policy)
    assert isinstance(optimizer, type(MAKERS[make](model)))
    train(world, optimizer, model, 5)
    assert torch.allclose(weights(model), reference(world, MAKERS[make], 5), atol=1e-5)
    assert optimizer.rounds == 5


@pytest.mark.parametrize("make", ["momentum", "adam"])
@pytest.mark.parametrize("policy", ["solo", "majority", "majority:random", "quorum:0.75"])
def test_learns_under_every_policy(world: World, policy: str, make: str) -> None:
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)
        if make == "momentum"
        else torch.optim.Adam(model.parameters(), lr=0.05),
        model.named_parameters(),
        sync=policy,
        max_staleness=2,  # steps without any compute make ranks so late on a busy machine that no rate is small enough
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    target = torch.tensor([[1.0, -2.0, 3.0]])
    # Adam moves a weight by its rate at most, and on a busy machine a late rank may get several results in one step.
    for _ in range(400):
        x = torch.randn(16, 3)
        optimizer.zero_grad()
        ((model(x) - x @ target.T) ** 2).mean().backward()
        optimizer.step()
    optimizer.flush()
    assert torch.allclose(model.weight, target, atol=0.2)


def test_a_replica_that_was_late_has_every_update(world: World) -> None:
    """SGD is linear in what it is given: with the sum of missed results replicas agree after a flush."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="solo")
    train(world, optimizer, model, 30)
    optimizer.flush()
    everybody = world.gather(weights(model))
    assert all(torch.allclose(other, everybody[0], atol=1e-5) for other in everybody)


def test_several_buckets_are_sent_while_backward_runs(world: World) -> None:
    model = make_model()
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups, sync=EVERYBODY)
    train(world, optimizer, model, 5)
    assert torch.allclose(weights(model), reference(world, sgd, 5), atol=1e-5)
    names = [name for name, stats in hvd.partial_stats().items() if stats["rounds"] == 5 and "Optimizer" in name]
    assert len(names) >= 2


@pytest.mark.parametrize("policy", ALL)
def test_gradient_clipping(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sync=policy)
    for step in range(4):
        optimizer.zero_grad()
        (100 * loss_of(model, world.rank, step)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norm = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm()
        assert norm <= 0.5001
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.flush()
    if policy in ("full", EVERYBODY):
        world.same(weights(model).tolist())


def test_step_after_synchronize_warns(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), sync=EVERYBODY)
    loss_of(model, world.rank, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    train(world, optimizer, model, 1, first=1)
    assert torch.allclose(weights(model), reference(world, sgd, 2), atol=1e-5)


@pytest.mark.parametrize("policy", ["full", EVERYBODY])
def test_backward_passes_per_step(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=2, sync=policy)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, world.rank, 2 * step + part).backward()
        optimizer.step()
    assert torch.allclose(weights(model), reference(world, sgd, 3, passes=2), atol=1e-5)


def test_too_many_backward_passes(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), sync=EVERYBODY)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, world.rank, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("policy", ["full", EVERYBODY])
def test_compression(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=hvd.Compression.fp16, sync=policy
    )
    train(world, optimizer, model, 3)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert torch.allclose(weights(model), reference(world, sgd, 3), atol=1e-2)
    world.same(weights(model).tolist())


@pytest.mark.parametrize("policy", ["full", EVERYBODY, "solo"])
def test_bfloat16(world: World, policy: str) -> None:
    model = make_model().to(torch.bfloat16)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sync=policy
    )
    for step in range(3):
        x, y = batch(world.rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
    optimizer.flush()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    if policy != "solo":
        world.same(weights(model).float().tolist())


def test_mixed_dtypes(world: World) -> None:
    single, double = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([single, double], lr=1.0), sync=EVERYBODY)
    ((single.sum() + double.sum()) * (world.rank + 1)).backward()
    optimizer.step()
    mean = sum(rank + 1 for rank in world.ranks) / world.size
    assert single.tolist() == [-mean] * 3
    assert double.tolist() == [-mean] * 3


@pytest.mark.parametrize("policy", ["full", EVERYBODY])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lr_scheduler(world: World, policy: str, when: str) -> None:
    model = make_model()
    optimizer = sgd(model)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=policy)
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    rates = []
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001, 0.001])
    assert optimizer.rounds == 5
    world.same(weights(model).tolist())


@pytest.mark.parametrize("policy", ["full", EVERYBODY, "solo"])
def test_closure(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sync=policy)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, calls)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert calls == 1
    optimizer.flush()


def test_lbfgs(world: World) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), sync="solo")
    hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), sync="full")


def test_sparse_gradients_are_refused(world: World) -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), sync="solo")
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        embedding(torch.tensor([world.rank % 5])).sum().backward()
    assert optimizer.rounds == 0


@pytest.mark.parametrize(("policy", "as_dense"), [("full", False), ("full", True), ("solo", True), (EVERYBODY, True)])
def test_sparse_gradients(world: World, policy: str, as_dense: bool) -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    with torch.no_grad():
        embedding.weight.zero_()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=1.0), sparse_as_dense=as_dense, sync=policy
    )
    for _ in range(2):
        embedding(torch.tensor([world.rank % 5])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.flush()
    counts = torch.zeros(5)
    for rank in world.ranks:
        counts[rank % 5] += 1
    assert torch.allclose(embedding.weight[:, 0], -2 * counts / world.size)


@pytest.mark.parametrize("policy", ["full", EVERYBODY])
def test_unused_parameters(world: World, policy: str) -> None:
    used, unused = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))
    sometimes = torch.nn.Parameter(torch.zeros(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, sometimes, frozen], lr=1.0), sync=policy)
    for _ in range(2):
        optimizer.zero_grad()
        loss = used.sum()
        if world.rank == 0:
            loss = loss + sometimes.sum()
        loss.backward()
        optimizer.step()
    assert used.tolist() == [-2.0] * 2
    assert unused.tolist() == [1.0] * 2
    assert frozen.tolist() == [1.0] * 2
    assert torch.allclose(sometimes, torch.full((2,), -2.0 / world.size))


@pytest.mark.parametrize("policy", ["full", EVERYBODY])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(world: World, policy: str, to_none: bool) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sync=policy)
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        grads = [p.grad for p in model.parameters()]
        assert all(g is None for g in grads) if to_none or step == 0 else all(g.abs().max() == 0 for g in grads)
        loss_of(model, world.rank, step).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
    assert torch.allclose(weights(model), reference(world, sgd, 3), atol=1e-5)
    model.zero_grad()
    train(world, optimizer, model, 1, first=3)
    assert torch.allclose(weights(model), reference(world, sgd, 4), atol=1e-5)


@pytest.mark.parametrize("policy", ["full", EVERYBODY])
def test_pickling(world: World, policy: str) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model), model.named_parameters(), sync=policy)
    train(world, optimizer, model, 2)
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(copied) is torch.optim.Adam
        assert copied.defaults == optimizer.defaults
        assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    repr(optimizer)


@pytest.mark.parametrize("first", ["full", EVERYBODY, "horovod"])
@pytest.mark.parametrize("second", ["full", "solo"])
def test_wrapping_twice(world: World, first: str, second: str) -> None:
    model = make_model()
    if first == "horovod":
        optimizer = horovod.torch.DistributedOptimizer(sgd(model), model.named_parameters())
    else:
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sync=first)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=second)


def test_wrong_arguments(world: World) -> None:
    model = make_model()

    def wrap(**options: Any) -> Any:
        return hvd.DistributedOptimizer(sgd(model), **({"sync": "solo"} | options))

    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync": "most"}, "unknown sync policy"),
        ({"missed": "none"}, "missed must be"),
        ({"divisor": "none"}, "divisor must be"),
        ({"max_staleness": -1}, "max_staleness must be"),
        ({"grace_ms": -1}, "grace_ms must be"),
        ({"model_sync_every": 0}, "model_sync_every must be"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be"),
        ({"op": hvd.Max}, r"hvd.Average or hvd.Sum"),
        ({"op": hvd.Adasum}, r"hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups should be"),
        ({"groups": [["x"]]}, "groups must consist of"),
        ({"groups": [[model[0].weight], [model[0].weight]]}, "only appear once"),
        ({"named_parameters": list(model.parameters())}, "sequence of tuples"),
        ({"named_parameters": [("a", p) for p in model.parameters()]}, "must be unique"),
        ({"named_parameters": list(model[0].named_parameters())}, "were not named"),
    ]
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            wrap(**options)
    with pytest.raises(TypeError, match="sync must be a policy"):
        wrap(sync=1)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(num_groups=1)


def test_predivide_factor_and_sum(world: World) -> None:
    for options, factor in (({"gradient_predivide_factor": 4.0}, 1 / world.size), ({"op": hvd.Sum}, 1.0)):
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync=EVERYBODY, **options)
        (weight.sum() * (world.rank + 1)).backward()
        optimizer.step()
        assert torch.allclose(weight, torch.full((2,), -factor * sum(rank + 1 for rank in world.ranks)))


@pytest.mark.parametrize("policy", ["full", "solo", EVERYBODY])
@pytest.mark.parametrize("module", [hvd, horovod.torch], ids=["ours", "horovod"])
@pytest.mark.parametrize("make", ["momentum", "adam"])
def test_broadcast_optimizer_state(world: World, policy: str, module: Any, make: str) -> None:
    model = make_model(world.rank)
    bare = MAKERS[make](model)
    if world.rank == 0:  # only the root has a state, as after loading a checkpoint there
        loss_of(model, 0, 0).backward()
        bare.step()
        bare.zero_grad()
        bare.param_groups[0]["lr"] = 0.05
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync=policy)
    module.broadcast_parameters(model.state_dict(), 0)
    module.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    world.same(weights(model).tolist())
    states = [
        {key: value.tolist() if torch.is_tensor(value) else value for key, value in optimizer.state[p].items()}
        for p in model.parameters()
    ]
    world.same(states)
    train(world, optimizer, model, 2, first=1)
    optimizer.flush()


def test_state_dict_round_trip(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model), model.named_parameters(), sync=EVERYBODY)
    train(world, optimizer, model, 2)
    state, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    assert set(state) == set(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).state_dict())
    train(world, optimizer, model, 2, first=2)
    after = weights(model)
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    train(world, optimizer, model, 2, first=2)
    assert torch.allclose(weights(model), after, atol=1e-6)


def test_flush_under_way_is_refused(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), sync=EVERYBODY)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match="flush"):
        optimizer.flush()
    with pytest.raises(AssertionError, match="load_state_dict"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.flush()


def test_two_optimizers(world: World) -> None:
    """As in a GAN: each has buckets of its own."""
    one, two = make_model(1), make_model(2)
    optimizers = [
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sync=EVERYBODY) for model in (one, two)
    ]
    for step in range(3):
        for optimizer, model in zip(optimizers, (one, two), strict=True):
            optimizer.zero_grad()
            loss_of(model, world.rank, step).backward()
            optimizer.step()
    world.same((weights(one).tolist(), weights(two).tolist()))


def test_policy_from_the_environment_is_full_by_default(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    before = set(hvd.partial_stats())
    train(world, optimizer, model, 1)
    assert set(hvd.partial_stats()) == before


@pytest.mark.launch(label="majority-by-environment", environment={"HOROVOD_PARTIAL_SYNC": "majority"})
def test_policy_from_the_environment(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(world, optimizer, model, 3)
    optimizer.flush()
    assert any("Optimizer" in name for name in hvd.partial_stats())
    before = set(hvd.partial_stats())
    explicit = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), sync="full")
    assert set(hvd.partial_stats()) == before
    assert explicit.is_horovod_partial
