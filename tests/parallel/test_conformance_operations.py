"""`hvd.partial_allreduce` of every front end: types, shapes, arguments, errors. All ranks are on time."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from harness.fronts import Front
from harness.matrix import alone, process_sets
from harness.script import same_error
from harness.trainers import EVERYBODY
from harness.world import World, expected_sum

from horovod_partial.policies import Majority, PartialReduce, Quorum

TYPES = ["int32", "int64", "float16", "float32", "float64", "bfloat16"]
odd_ranks = pytest.mark.parametrize("odd", [0, 1])


@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("dtype", TYPES)
def test_dtypes(front: Front, world: World, dtype: str, in_place: bool) -> None:
    begin = front.bind(in_place=in_place, name=world.name(), op=front.hvd.Sum, sync=EVERYBODY)
    for step in range(2):
        numbers = (world.rank + 1 + step, expected_sum(world) + step * world.size)
        own, expected = [[[number] * 3] * 2 for number in numbers]
        tensor = (front.variable if in_place else front.tensor)(own, dtype)
        result, _ = begin(tensor).end()
        assert front.dtype(result) == dtype
        assert front.array(result).tolist() == expected
        assert front.array(tensor).tolist() == (expected if in_place else own)


@alone
def test_dtypes_that_are_not_reduced(front: Front, world: World) -> None:
    for dtype in front.unsupported:
        with pytest.raises(ValueError, match=rf"Tensor type (torch\.)?{dtype} is not supported"):
            front.run(front.tensor(np.zeros(3), dtype), name=world.name(), sync=EVERYBODY)


@alone
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_are_not_averaged(front: Front, world: World, dtype: str) -> None:
    """Each round would cut a fraction off: 60 ones would come to 50 to 58."""
    tensor = front.tensor(np.ones(3), dtype)
    for options in ({}, {"op": front.hvd.Sum, "prescale_factor": 0.5}, {"op": front.hvd.Sum, "postscale_factor": 1.5}):
        with pytest.raises(ValueError, match=r"integers cannot be averaged or scaled .*op=hvd\.Sum"):
            front.run(tensor, name=world.name(), sync=EVERYBODY, **options)
    result, _ = front.run(tensor, name=world.name(), op=front.hvd.Sum, sync="solo")
    assert front.array(result).tolist() == [world.size] * 3


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4), (1023,)], ids=str)
def test_shapes(front: Front, world: World, shape: tuple[int, ...]) -> None:
    tensor = front.tensor(np.full(shape, world.rank + 1.0))
    result, _ = front.run(tensor, name=world.name(), op=front.hvd.Sum, sync="solo")
    assert tuple(result.shape) == shape
    assert np.array_equal(front.array(result), np.full(shape, float(expected_sum(world))))


def test_scaling(front: Front, world: World) -> None:
    options = {"sync": EVERYBODY, "prescale_factor": 0.1, "postscale_factor": 3.0}
    for op, divisor in ((front.hvd.Sum, 1), (front.hvd.Average, world.size)):
        result = front.reduce([world.rank + 1.0], "float64", name=world.name(str(op)), op=op, **options)
        assert result == pytest.approx([0.3 * expected_sum(world) / divisor], rel=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_average_is_the_default(front: Front, world: World, dtype: str) -> None:
    result = front.reduce([0.25 * (world.rank + 1)] * 5, dtype, name=world.name(), sync=EVERYBODY)
    assert np.allclose(result, 0.25 * expected_sum(world) / world.size, rtol=0.0 if dtype == "float32" else 1e-2)


def test_the_same_name_in_every_round(front: Front, world: World) -> None:
    begin = front.bind(name=world.name(), op=front.hvd.Sum, sync=EVERYBODY)
    for step in range(20):
        result, info = begin(front.tensor([step], "int64")).end()
        assert front.array(result).tolist() == [step * world.size]
        assert (info.round, info.late, info.staleness) == (step, False, 0)
        assert info.fresh == info.gradients == world.size
        assert info.members == tuple(world.ranks)


@pytest.mark.parametrize("sync", ["solo", EVERYBODY])
def test_several_threads_of_the_application(front: Front, world: World, sync: str) -> None:
    calls = [front.bind(name=world.name(str(index)), op=front.hvd.Sum, sync=sync) for index in range(3)]

    def work(index: int) -> int:
        results = [calls[index](front.tensor([index], "int64")).end()[0] for _ in range(10)]
        return sum(front.array(result).item() for result in results)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    # A rank whose one thread waits seems to wait, whatever its others are about to do: where those are held up a round
    # may close without them (rule 7), and what they bring travels in the next.
    front.hvd.flush()
    for index, result in enumerate(results):
        rest = front.collect(world.name(str(index)), np.zeros(1, np.int64)).item()
        assert result + rest == index * world.size * 10


def test_threads_flush_one_after_the_other(front: Front, world: World) -> None:
    """Each call is a flush of its own, so ranks whose threads call equally often stay in step."""
    front.run(front.tensor(np.zeros(1)), name=world.name(), op=front.hvd.Sum, sync=EVERYBODY)
    if world.rank == 0:
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda _: front.hvd.flush(), range(6))) == [None] * 6
    else:
        for _ in range(6):
            front.hvd.flush()
    front.check_that_the_job_goes_on(world)


def test_one_rank_alone_may_call_init_again(front: Front, world: World) -> None:
    if world.rank == 0:
        front.hvd.init()
    front.check_that_the_job_goes_on(world)


# --- Errors -----------------------------------------------------------------------------------------------------------


@alone
def test_wrong_arguments(front: Front, world: World) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"name": None}, ValueError, "needs a name"),
        ({"name": "horovod_partial.farewell"}, ValueError, "internal buckets"),
        ({"sync": "most"}, ValueError, "unknown sync policy 'most'"),
        ({"sync": 3}, ValueError, "sync must be a policy"),
        ({"sync": "group_average"}, ValueError, "averages models: pass it to hvd.average or"),
        ({"sync": PartialReduce(2)}, ValueError, "averages models"),
        ({"sync": "weighted_average:2,0.9"}, ValueError, "averages models"),
        ({"sync": "solo:grace_ms=long"}, ValueError, "grace_ms must be"),
        ({"stalenes": 3}, TypeError, "unexpected keyword"),
        ({"sync": None, "name": front.hvd.Solo()}, ValueError, r"name is Solo\(.*sync=Solo\("),
        ({"sync": None, "op": front.hvd.Majority()}, ValueError, r"op is Majority\("),
    ]
    refused = [getattr(front.hvd, op) for op in ("Max", "Min", "Product", "Adasum")]
    cases += [({"op": op}, ValueError, "hvd.Average or hvd.Sum") for op in refused]
    for options, kind, text in cases:
        with pytest.raises(kind, match=text):
            front.run(front.tensor(np.zeros(3)), **({"name": world.name(), "sync": EVERYBODY} | options))
    front.check_that_the_job_goes_on(world)


@odd_ranks
@pytest.mark.parametrize("policy", ["solo", EVERYBODY])
def test_different_shapes(front: Front, world: World, odd: int, policy: str) -> None:
    shape = (2, 3) if world.rank == odd else (6,)
    same_error(front, world, front.tensor(np.zeros(shape)), "shape", sync=policy)


@odd_ranks
def test_different_dtypes(front: Front, world: World, odd: int) -> None:
    dtype = "float64" if world.rank == odd else "float32"
    same_error(front, world, front.tensor(np.zeros(3), dtype), "type", sync="solo")


@odd_ranks
@pytest.mark.parametrize(
    ("own", "others", "words"),
    [
        ({"sync": "solo"}, {"sync": "majority"}, ("Solo()", "Majority(")),
        ({"sync": Quorum(1)}, {"sync": "solo"}, ("Quorum(ranks=1)", "Solo()")),
        ({"sync": "solo:max_staleness=3"}, {"sync": "solo"}, ("Solo(max_staleness=3)", "Solo()")),
        ({"sync": "solo:missed=latest"}, {"sync": "solo"}, ("Solo(missed='latest')", "Solo()")),
        ({"sync": Majority("random", seed=1)}, {"sync": Majority("random", seed=2)}, ("seed=1", "seed=2")),
    ],
    ids=["policy", "equivalent", "max_staleness", "missed", "seed"],
)
def test_different_policies(front: Front, world: World, odd: int, own: dict, others: dict, words: tuple) -> None:
    options = own if world.rank == odd else others
    same_error(front, world, front.tensor(np.zeros(3)), "Mismatched sync policies", *words, **options)


def test_name_bound_to_another_declaration(front: Front, world: World) -> None:
    begin = front.bind(name=world.name(), sync=EVERYBODY)
    begin(front.tensor(np.zeros(3))).end()
    text = rf"the name {re.escape(world.name())} is bound to another shape, dtype, device, policy or scaling"
    for values, dtype in ((np.zeros(4), "float32"), (np.zeros(3), "float64"), (np.zeros((3, 1)), "float32")):
        with pytest.raises(front.misfit, match=text):
            begin(front.tensor(values, dtype)).end()
    with pytest.raises(front.misfit, match="is bound to another"):
        front.run(front.tensor(np.zeros(3)), name=world.name(), sync="solo")
    assert front.array(begin(front.tensor(np.ones(3))).end()[0]).tolist() == [1.0] * 3
    front.check_that_the_job_goes_on(world)


# --- Process sets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def halves(front: Front, world: World) -> Iterator[list[Any]]:
    if world is None:  # here only the outcome is asked for
        yield []
        return
    sets = [front.hvd.add_process_set([0, 1]), front.hvd.add_process_set([2, 3])]
    yield sets
    world.barrier()
    for process_set in sets:
        front.hvd.remove_process_set(process_set)


@process_sets
@pytest.mark.parametrize("policy", ["solo", EVERYBODY])
def test_process_sets(front: Front, world: World, halves: list[Any], policy: str) -> None:
    mine, other = halves if world.rank < 2 else halves[::-1]
    begin = front.bind(name=world.name(), op=front.hvd.Sum, sync=policy, process_set=mine)
    results = [begin(front.tensor([10 * step + world.rank], "int64")).end()[0] for step in range(5)]
    delivered = sum(front.array(result).item() for result in results)
    front.hvd.flush(process_set=mine)
    delivered += front.collect(world.name(), np.zeros(1, np.int64), mine.process_set_id).item()
    assert delivered == sum(10 * step + rank for step in range(5) for rank in mine.ranks)
    assert world.name() in front.hvd.partial_stats(process_set=mine)
    with pytest.raises((ValueError, front.misfit), match=r"not in (the )?process set"):
        front.run(front.tensor([0.0]), name=world.name("other"), sync=policy, process_set=other)
    world.barrier()
    front.check_that_the_job_goes_on(world)


@process_sets
def test_average_over_a_process_set(front: Front, world: World, halves: list[Any]) -> None:
    mine = halves[world.rank // 2]
    result, info = front.run(front.tensor([1.0 * world.rank]), name=world.name(), sync="solo", process_set=mine)
    assert front.array(result).item() == sum(mine.ranks) / 2
    assert info.fresh == 2
