"""`hvd.partial_allreduce` and its kin: arguments, types, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import horovod.torch
import pytest
import torch
from harness.buckets import collect
from harness.world import World

import horovod_partial.torch as hvd

DTYPES = [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16]
PARTIAL = "quorum:1.0"  # every rank is on time: results are known


def expected_sum(world: World) -> int:
    return sum(rank + 1 for rank in world.ranks)


def test_superset_of_horovod_torch(world: World) -> None:
    public = [name for name in dir(horovod.torch) if not name.startswith("_")]
    assert [name for name in public if not hasattr(hvd, name)] == []
    assert hvd.allreduce(torch.tensor([world.rank + 1]), name=world.name(), op=hvd.Sum).item() == expected_sum(world)
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(world: World, dtype: torch.dtype) -> None:
    for form, start in (("out", hvd.partial_allreduce_async), ("in", hvd.partial_allreduce_async_)):
        tensor = torch.full((2, 3), world.rank + 1, dtype=dtype)
        result = hvd.synchronize(start(tensor, name=world.name(form), op=hvd.Sum, sync=PARTIAL))
        assert result.dtype == dtype
        assert result.shape == (2, 3)
        assert result.tolist() == [[expected_sum(world)] * 3] * 2
        assert (result.data_ptr() == tensor.data_ptr()) == (form == "in")
        untouched = expected_sum(world) if form == "in" else world.rank + 1
        assert tensor.tolist() == [[untouched] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool, torch.int16, torch.complex64], ids=str)
def test_dtypes_that_horovod_for_torch_does_not_reduce(world: World, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"Tensor type {dtype} is not supported"):
        hvd.partial_allreduce(torch.zeros(3, dtype=dtype), name=world.name(), sync=PARTIAL)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4)], ids=str)
def test_shapes(world: World, shape: tuple[int, ...]) -> None:
    result = hvd.partial_allreduce(torch.full(shape, world.rank + 1.0), name=world.name(), op=hvd.Sum, sync="solo")
    assert result.shape == shape
    assert torch.equal(result, torch.full(shape, float(expected_sum(world))))


def test_average_is_the_default(world: World) -> None:
    result = hvd.partial_allreduce(torch.full((2,), world.rank + 1.0), name=world.name(), sync=PARTIAL)
    assert result.tolist() == [expected_sum(world) / world.size] * 2


def test_scaling(world: World) -> None:
    arguments = {"sync": PARTIAL, "prescale_factor": 0.5, "postscale_factor": 3.0}
    result = hvd.partial_allreduce(torch.tensor([world.rank + 1.0]), name=world.name("sum"), op=hvd.Sum, **arguments)
    assert result.item() == pytest.approx(1.5 * expected_sum(world))
    result = hvd.partial_allreduce(torch.tensor([world.rank + 1.0]), name=world.name("average"), **arguments)
    assert result.item() == pytest.approx(1.5 * expected_sum(world) / world.size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_average(world: World, dtype: torch.dtype) -> None:
    tensor = torch.full((5,), 0.25 * (world.rank + 1), dtype=dtype)
    result = hvd.partial_allreduce(tensor, name=world.name(), sync=PARTIAL)
    assert torch.allclose(result.float(), torch.full((5,), 0.25 * expected_sum(world) / world.size), rtol=1e-2)


def test_full_is_horovods_own_operation(world: World) -> None:
    tensor = torch.rand(1000, generator=torch.manual_seed(world.rank))
    for policy in (hvd.Full(), "full", None):
        handle = hvd.partial_allreduce_async(tensor, name=world.name("ours"), sync=policy)
        assert isinstance(handle, int)
        info = hvd.round_info(handle)
        ours = hvd.synchronize(handle)
        theirs = horovod.torch.allreduce(tensor, name=world.name("theirs"))
        assert torch.allclose(ours, theirs, atol=1e-6)
        assert (info.round, info.late, info.fresh, info.gradients) == (-1, False, -1, -1)
    largest = hvd.partial_allreduce(torch.tensor([world.rank]), name=world.name("max"), op=hvd.Max, sync="full")
    assert largest.item() == world.size - 1


def test_the_same_name_in_every_round(world: World) -> None:
    for step in range(20):
        result = hvd.partial_allreduce(torch.tensor([step]), name=world.name(), op=hvd.Sum, sync=PARTIAL)
        assert result.item() == step * world.size


def test_several_threads_of_the_application(world: World) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(index: int) -> list[int]:
        name = world.name(str(index))
        return [
            hvd.partial_allreduce(torch.tensor([index]), name=name, op=hvd.Sum, sync=PARTIAL).item() for _ in range(10)
        ]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    # A rank whose one thread waits seems to wait, whatever its others are about to do: where those are held up a round
    # may close without them (rule 7), and what they bring travels in the next.
    hvd.flush()
    for index in range(3):
        name = world.name(str(index))
        rest = hvd.partial_allreduce(torch.tensor([0]), name=name, op=hvd.Sum, sync=PARTIAL).item()
        assert sum(results[index]) + rest == index * world.size * 10


# --- Errors -----------------------------------------------------------------------------------------------------------


def check_that_the_job_goes_on(world: World) -> None:
    result = hvd.partial_allreduce(torch.tensor([world.rank + 1]), name=world.name("after"), op=hvd.Sum, sync="solo")
    assert result.item() == expected_sum(world)
    assert hvd.allreduce(torch.tensor([1]), name=world.name("after.full"), op=hvd.Sum).item() == world.size


def test_unknown_policy(world: World) -> None:
    with pytest.raises(ValueError, match="unknown sync policy 'most'"):
        hvd.partial_allreduce(torch.zeros(1), name=world.name(), sync="most")
    with pytest.raises(TypeError, match="sync must be a policy"):
        hvd.partial_allreduce(torch.zeros(1), name=world.name(), sync=3)
    check_that_the_job_goes_on(world)


@pytest.mark.parametrize("op", ["Max", "Min", "Product", "Adasum"])
def test_operations_that_only_full_has(world: World, op: str) -> None:
    with pytest.raises(ValueError, match=r"hvd.Average or hvd.Sum"):
        hvd.partial_allreduce(torch.zeros(1), name=world.name(), op=getattr(hvd, op), sync=PARTIAL)


def test_wrong_arguments(world: World) -> None:
    tensor = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="needs a name"):
        hvd.partial_allreduce(tensor, sync=PARTIAL)
    with pytest.raises(ValueError, match="required to be contiguous"):
        hvd.partial_allreduce(tensor.t()[:2], name=world.name(), sync=PARTIAL)
    with pytest.raises(ValueError, match="divisor must be"):
        hvd.partial_allreduce(tensor, name=world.name(), sync=PARTIAL, divisor="all")
    with pytest.raises(ValueError, match="max_staleness must be"):
        hvd.partial_allreduce(tensor, name=world.name(), sync=PARTIAL, max_staleness=-1)
    with pytest.raises(ValueError, match="grace_ms must be"):
        hvd.partial_allreduce(tensor, name=world.name(), sync=PARTIAL, grace_ms="long")
    with pytest.raises(ValueError, match="missed must be"):
        hvd.partial_allreduce(tensor, name=world.name(), sync=PARTIAL, missed="none")
    with pytest.raises(TypeError, match="unexpected keyword"):
        hvd.partial_allreduce(tensor, name=world.name(), sync=PARTIAL, stalenes=3)
    with pytest.raises(ValueError, match="meta"):
        hvd.partial_allreduce(torch.zeros(3, device="meta"), name=world.name(), sync=PARTIAL)
    check_that_the_job_goes_on(world)


def same_error(world: World, start: object, *parts: str) -> None:
    """Every rank gets the same error, with these words in it."""
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(start())
    text = world.same(str(caught.value))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("policy", ["solo", "quorum:1.0"])
def test_different_shapes(world: World, odd: int, policy: str) -> None:
    shape = (2, 3) if world.rank == odd else (6,)
    start = lambda: hvd.partial_allreduce_async(torch.zeros(shape), name=world.name(), sync=policy)
    same_error(world, start, "shape")
    check_that_the_job_goes_on(world)
    # The name is free again.
    result = hvd.partial_allreduce(torch.ones(3), name=world.name(), op=hvd.Sum, sync=policy)
    assert result.tolist() == [world.size] * 3


@pytest.mark.parametrize("odd", [0, 1])
def test_different_dtypes(world: World, odd: int) -> None:
    dtype = torch.float64 if world.rank == odd else torch.float32
    same_error(
        world, lambda: hvd.partial_allreduce_async(torch.zeros(3, dtype=dtype), name=world.name(), sync="solo"), "type"
    )
    check_that_the_job_goes_on(world)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("own", "others", "words"),
    [
        ({"sync": "solo"}, {"sync": "majority"}, ("Solo()", "Majority(")),
        ({"sync": hvd.Quorum(1)}, {"sync": "solo"}, ("Quorum(ranks=1)", "Solo()")),
        ({"sync": "solo", "max_staleness": 3}, {"sync": "solo"}, ("max_staleness=3", "max_staleness=16")),
        ({"sync": "solo", "missed": "latest"}, {"sync": "solo"}, ("missed=latest",)),
        ({"sync": "solo", "divisor": "contributors"}, {"sync": "solo"}, ("divisor=contributors",)),
        ({"sync": hvd.Majority("random", seed=1)}, {"sync": hvd.Majority("random", seed=2)}, ("seed=1", "seed=2")),
    ],
    ids=["policy", "equivalent", "max_staleness", "missed", "divisor", "seed"],
)
def test_different_policies(world: World, odd: int, own: dict, others: dict, words: tuple[str, ...]) -> None:
    options = own if world.rank == odd else others
    start = lambda: hvd.partial_allreduce_async(torch.zeros(3), name=world.name(), **options)
    same_error(world, start, "Mismatched sync policies", *words)
    check_that_the_job_goes_on(world)


def test_full_on_one_rank_only(world: World) -> None:
    """`Full()` is Horovod's own path, under Horovod's own name: the ranks wait for each other there and here."""
    if world.rank == 1:
        full = hvd.partial_allreduce_async(torch.ones(1), name=world.name(), op=hvd.Sum, sync="full")
        partial = hvd.partial_allreduce_async(torch.ones(1), name=world.name(), op=hvd.Sum, sync="solo")
    else:
        partial = hvd.partial_allreduce_async(torch.ones(1), name=world.name(), op=hvd.Sum, sync="solo")
        full = hvd.partial_allreduce_async(torch.ones(1), name=world.name(), op=hvd.Sum, sync="full")
    assert hvd.synchronize(full).item() == world.size
    assert hvd.synchronize(partial).item() == world.size


def test_name_bound_to_another_declaration(world: World) -> None:
    name = world.name()
    hvd.partial_allreduce(torch.zeros(3), name=name, sync=PARTIAL)
    with pytest.raises(
        ValueError, match=rf"the name {re.escape(name)} is bound to another shape, dtype, policy or scaling"
    ):
        hvd.partial_allreduce(torch.zeros(4), name=name, sync=PARTIAL)
    with pytest.raises(ValueError, match="is bound to another"):
        hvd.partial_allreduce(torch.zeros(3), name=name, sync="solo")
    with pytest.raises(ValueError, match="is bound to another"):
        hvd.partial_allreduce(torch.zeros(3, dtype=torch.int32), name=name, sync=PARTIAL)
    assert hvd.partial_allreduce(torch.ones(3), name=name, sync=PARTIAL).tolist() == [1.0] * 3


def test_name_in_use(world: World) -> None:
    name = world.name()
    handle = (
        hvd.partial_allreduce_async(torch.ones(1), name=name, op=hvd.Sum, sync=PARTIAL) if world.rank == 0 else None
    )
    if handle is not None:
        with pytest.raises(ValueError, match=rf"rank 0: the name {re.escape(name)} is in use by an operation"):
            hvd.partial_allreduce_async(torch.ones(1), name=name, op=hvd.Sum, sync=PARTIAL)
    world.barrier()
    handle = handle or hvd.partial_allreduce_async(torch.ones(1), name=name, op=hvd.Sum, sync=PARTIAL)
    assert hvd.synchronize(handle).item() == world.size


# --- Process sets -----------------------------------------------------------------------------------------------------

process_sets = pytest.mark.launch(
    label="process-sets", environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, full_ranks=(4,)
)


@pytest.fixture
def halves(world: World) -> Iterator[list[hvd.ProcessSet]]:
    if world is None:  # here only the outcome is asked for
        yield []
        return
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    yield sets
    world.barrier()
    for process_set in sets:
        hvd.remove_process_set(process_set)


@process_sets
@pytest.mark.parametrize("policy", ["solo", "quorum:1.0"])
def test_process_sets(world: World, halves: list[hvd.ProcessSet], policy: str) -> None:
    mine, other = halves if world.rank < 2 else halves[::-1]
    delivered = 0
    for step in range(5):
        tensor = torch.tensor([10 * step + world.rank])
        delivered += hvd.partial_allreduce(tensor, name=world.name(), op=hvd.Sum, sync=policy, process_set=mine).item()
    hvd.flush(process_set=mine)
    zero = torch.zeros(1, dtype=torch.int64)
    delivered += collect(world.name(), zero, mine.process_set_id).item()
    assert delivered == sum(10 * step + rank for step in range(5) for rank in mine.ranks)
    assert world.name() in hvd.partial_stats(process_set=mine)
    with pytest.raises(ValueError, match=r"not in (the )?process set"):
        hvd.partial_allreduce(zero, name=world.name("other"), sync=policy, process_set=other)
    world.barrier()
    assert hvd.partial_allreduce(zero + 1, name=world.name("all"), op=hvd.Sum, sync=PARTIAL).item() == world.size


@process_sets
def test_average_over_a_process_set(world: World, halves: list[hvd.ProcessSet]) -> None:
    mine = halves[world.rank // 2]
    handle = hvd.partial_allreduce_async(
        torch.tensor([1.0 * world.rank]), name=world.name(), sync="solo", process_set=mine
    )
    assert hvd.synchronize(handle).item() == sum(mine.ranks) / 2
    assert hvd.round_info(handle).fresh == 2


@process_sets
def test_an_optimizer_on_a_process_set(world: World, halves: list[hvd.ProcessSet]) -> None:
    mine = halves[world.rank // 2]
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync="quorum:1.0", process_set=mine)
    (weight.sum() * (world.rank + 1)).backward()
    optimizer.step()
    assert weight.tolist() == [-(sum(mine.ranks) + 2) / 2] * 3
    optimizer.flush()
