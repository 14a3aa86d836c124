"""Partial collectives of TensorFlow's tensors: in eager code, in graphs, after saving; their arguments and errors."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.arguments import NONSENSE, check_nonsense
from harness.fronts import front_of
from harness.matrix import FRONT_END, alone, process_sets, scripted
from harness.models import FOR_EVER
from harness.script import all_but, total, value
from harness.trainers import EVERYBODY, batch, joined
from harness.world import World, delay, expected_sum

import horovod_partial.tensorflow as hvd
from horovod_partial import _core
from horovod_partial.tensorflow.gradients import native
from horovod_partial.tensorflow.graph import runtime

pytestmark = [pytest.mark.launch(framework="tensorflow", **FRONT_END), pytest.mark.one_in(6)]

FRONT = front_of("eager")
modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


# What Horovod 0.28.1 broadcasts, and what we do beside it.
BROADCAST = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool]
BROADCAST += [tf.bfloat16, tf.uint32, tf.uint64]


def name_of(dtype: Any) -> str:
    return str(dtype.name)


def run_as(graph: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function in eager code or as a graph. AutoGraph, which takes its time, has tests of its own."""
    return tf.function(function, autograph=False) if graph else function


def need_keras_3() -> None:
    """Skip the rest of a test on Keras 2, which has no variables of its own."""
    if not hasattr(keras, "Variable"):
        pytest.skip(f"needs Keras 3, and Keras {keras.__version__} is installed")


def variable_of(kind: str) -> Any:
    """TensorFlow's class of variables, or Keras's."""
    if kind == "tf":
        return tf.Variable
    need_keras_3()
    return keras.Variable


# --- Everybody on time ------------------------------------------------------------------------------------------------


def test_a_shape_that_the_graph_does_not_know(world: World) -> None:
    """It is the bucket's from the first round on."""

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return hvd.partial_allreduce(tensor, name=world.name(), op=hvd.Sum, sync=EVERYBODY)

    for _ in range(2):
        assert reduce(tf.ones([2, 3])).numpy().tolist() == [[world.size] * 3] * 2


SHAPES: list[tuple[int, ...]] = [(), (3,), (0,), (2, 5), (17,), (1, 1, 1), (64,), (0, 3), (33,)]


def several(dtype: Any, factor: int) -> list[tf.Tensor]:
    """Tensors of many shapes, whose elements differ."""
    numbers = [tf.range(np.prod(shape, dtype=int)) % 7 + i for i, shape in enumerate(SHAPES)]
    return [tf.cast(tf.reshape(one, shape) * factor, dtype) for one, shape in zip(numbers, SHAPES, strict=True)]


def equal(results: Sequence[tf.Tensor], expected: Sequence[tf.Tensor]) -> bool:
    return len(results) == len(expected) and all(
        one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one.numpy(), other.numpy())
        for one, other in zip(results, expected, strict=True)
    )


@modes
@pytest.mark.parametrize("dtype", [tf.int32, tf.float16, tf.float64, tf.bfloat16], ids=name_of)
def test_several_tensors_travel_as_one(world: World, dtype: Any, graph: bool) -> None:
    name = world.name()
    reduce = run_as(graph, lambda *x: hvd.partial_allreduce(list(x), name=name, op=hvd.Sum, sync=EVERYBODY))
    for step in range(2):
        tensors = several(dtype, world.rank + 1 + step)
        assert equal(reduce(*tensors), several(dtype, expected_sum(world) + step * world.size))
        assert equal(tensors, several(dtype, world.rank + 1 + step))
    assert hvd.partial_stats()[name]["rounds"] == 2


@modes
@pytest.mark.parametrize("shapes", [[(5,)], [(0,), (2, 0)]], ids=["one", "without elements"])
def test_lists_of_few_elements(world: World, shapes: list[tuple[int, ...]], graph: bool) -> None:
    reduce = run_as(graph, lambda *x: hvd.partial_allreduce(x, name=world.name(), op=hvd.Sum, sync=EVERYBODY))
    assert equal(reduce(*map(tf.ones, shapes)), [tf.fill(shape, float(world.size)) for shape in shapes])


@modes
def test_round_info(world: World, graph: bool) -> None:
    """It is in tensors, because a graph has no numbers."""
    reduce = run_as(graph, lambda x: hvd.partial_allreduce(x, name=world.name(), sync=EVERYBODY, return_info=True))
    _, info = reduce(tf.constant([1.0]))
    assert [field.dtype for field in info] == [tf.int64] * 6 + [tf.int32] * 2
    assert [field.shape for field in info[:6]] == [()] * 6
    assert info.empty.numpy() == 0


@pytest.mark.parametrize("kind", ["tf", "keras", "numpy"])
def test_what_can_be_made_a_tensor(world: World, kind: str) -> None:
    """Variables, Keras's too, and arrays: they stay as they are."""
    array = np.full(3, world.rank + 1, np.float32)
    one = array.copy() if kind == "numpy" else variable_of(kind)(array)
    result = hvd.partial_allreduce(one, name=world.name(), op=hvd.Sum, sync=EVERYBODY)
    assert result.numpy().tolist() == [expected_sum(world)] * 3
    result = hvd.average(one, hvd.PartialReduce(world.size), name=world.name("ready"))
    assert result.numpy().tolist() == [expected_sum(world) / world.size] * 3
    assert np.array_equal(np.asarray(one), array)


def test_a_variable_in_a_graph_keeps_its_value(world: World) -> None:
    variable = tf.Variable([world.rank + 1.0])

    @tf.function
    def reduce() -> tuple[tf.Tensor, tf.Tensor]:
        result = hvd.partial_allreduce(variable, name=world.name(), op=hvd.Sum, sync=EVERYBODY)
        return result, variable + 0.0

    for _ in range(2):
        result, own = reduce()
        assert (result.numpy().item(), own.numpy().item()) == (expected_sum(world), world.rank + 1)


# --- Broadcast ---------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("inplace", [False, True], ids=["copies", "inplace"])
@pytest.mark.parametrize("kind", ["tf", "keras"])
def test_broadcast_goes_by_the_order_of_variables(world: World, kind: str, inplace: bool, graph: bool) -> None:
    """Keras counts models and layers through a program, so that names differ where a rank has made more of them."""
    make = variable_of(kind)
    first = make([world.rank, 2.0 * world.rank], name=f"kernel_{world.rank}")
    variables = [first, make(4.0 * world.rank, name="kernel_0")]

    def broadcast() -> None:
        hvd.broadcast_variables(variables, 1, inplace=inplace)

    run_as(graph, broadcast)()
    assert [variable.numpy().tolist() for variable in variables] == [[1.0, 2.0], 4.0]


@modes
def test_broadcast_of_all_types(world: World, graph: bool) -> None:
    values = [tf.fill(shape, world.rank % 2) for shape in ([3], [], [0])]
    variables = [tf.Variable(tf.cast(value, dtype)) for dtype in BROADCAST for value in values]

    def broadcast() -> None:
        hvd.broadcast_variables(variables, 1)

    run_as(graph, broadcast)()
    assert all((tf.cast(variable, tf.int32).numpy() == 1).all() for variable in variables)


@process_sets
def test_process_sets_that_overlap(world: World) -> None:
    """Rank 1 trains with rank 0, then with rank 2: its second variable is their first."""
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
    for process_set in [one for one in sets if one.included()]:
        variable = tf.Variable([1.0, 2.0])
        for _ in range(3):
            with hvd.DistributedGradientTape(tf.GradientTape(), process_set=process_set, sync=EVERYBODY) as tape:
                loss = tf.reduce_sum(variable)
            (gradient,) = tape.gradient(loss, [variable])
            variable.assign_sub(gradient)
        assert variable.numpy().tolist() == [-2.0, -1.0]
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


@process_sets
def test_broadcast_in_a_process_set(world: World) -> None:
    process_set = hvd.add_process_set([0, 2, 3])
    variable = tf.Variable(float(world.rank))
    if process_set.included():
        hvd.broadcast_variables([variable], 2, process_set=process_set)
        others = tf.Variable(tf.zeros(1 if world.rank == 3 else 2))
        with pytest.raises(ValueError, match=r"float32 \(1,\) on rank\(s\) 3"):
            hvd.broadcast_variables([others], 2, process_set=process_set)
    assert variable.numpy() == (2 if process_set.included() else 1)
    world.barrier()
    hvd.remove_process_set(process_set)


@pytest.mark.parametrize("inplace", [False, True], ids=["copies", "inplace"])
def test_broadcast_of_other_variables(world: World, inplace: bool) -> None:
    more = [tf.Variable(0.0) for _ in range(1 if world.rank == 0 else 2)]
    larger = [tf.Variable(tf.zeros(min(world.rank, 1)))]
    for others, what in (
        (more, r"number 1 is missing on rank 0, and float32 \(\) on rank\(s\) 1"),
        (larger, r"number 0 is float32 \(0,\) on rank 0, and float32 \(1,\) on rank\(s\) 1"),
    ):
        with pytest.raises(ValueError, match=f"ranks have different variables: {what}"):
            hvd.broadcast_variables(others, 0, inplace=inplace)


# --- Graphs -----------------------------------------------------------------------------------------------------------


def test_a_constant_is_not_folded(world: World) -> None:
    """Each run of the graph is an arrival, and the result is not written over the constant."""
    name = world.name()

    @tf.function
    def reduce() -> tf.Tensor:
        return hvd.partial_allreduce(tf.constant([2.0, 3.0]), name=name, op=hvd.Sum, sync=EVERYBODY)

    for step in range(3):
        assert reduce().numpy().tolist() == [2.0 * world.size, 3.0 * world.size]
        assert FRONT.completed(name) == step + 1


def test_an_arrival_whose_result_nobody_uses_is_not_pruned(world: World) -> None:
    name = world.name()

    @tf.function
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        hvd.partial_allreduce(tensor, name=name, op=hvd.Sum, sync=EVERYBODY)
        return tensor + 1

    for step in range(3):
        assert reduce(tf.constant([1.0])).numpy().tolist() == [2.0]
        assert FRONT.completed(name) == step + 1


def test_equal_arrivals_are_not_merged(world: World) -> None:
    """Two in one graph are two rounds, one after the other."""
    name = world.name()

    @tf.function
    def reduce(tensor: tf.Tensor) -> list[Any]:
        options = {"name": name, "op": hvd.Sum, "sync": EVERYBODY, "return_info": True}
        return [hvd.partial_allreduce(tensor, **options) for _ in range(2)]

    for step in range(2):
        for number, (result, info) in enumerate(reduce(tf.constant([1.0]))):
            assert result.numpy().tolist() == [world.size]
            assert info.round.numpy() == 2 * step + number


def test_arrivals_in_loops_and_branches(world: World) -> None:
    name = world.name()

    @tf.function
    def reduce(times: tf.Tensor) -> tf.Tensor:
        total = tf.constant([0.0])
        for i in tf.range(times):
            if i % 2 == 0:
                total += hvd.partial_allreduce(tf.constant([1.0]), name=name, op=hvd.Sum, sync=EVERYBODY)
            else:
                total += hvd.partial_allreduce(tf.constant([10.0]), name=name, op=hvd.Sum, sync=EVERYBODY)
        return total

    for times, expected in ((3, 12), (0, 0), (4, 22)):
        assert reduce(tf.constant(times)).numpy().tolist() == [expected * world.size]
    assert FRONT.completed(name) == 7


def test_the_same_name_in_eager_code_and_in_graphs(world: World) -> None:
    options = {"name": world.name(), "op": hvd.Sum, "sync": EVERYBODY, "return_info": True}
    calls = [run_as(graph, lambda x: hvd.partial_allreduce(x, **options)) for graph in (False, True, True)]
    for step, call in enumerate(calls * 2):
        result, info = call(tf.constant([float(world.rank)]))
        assert result.numpy().item() == sum(world.ranks)
        assert info.round.numpy() == step


@pytest.mark.parametrize("kind", ["one", "several", "model"])
def test_after_saving_and_loading(world: World, kind: str, tmp_path: Path) -> None:
    """The same name is the same bucket."""
    name = world.name()

    def reduce(tensor: tf.Tensor) -> Any:
        if kind == "model":
            return world.size * hvd.average(tensor, hvd.GroupAverage(64, grace_ms=FOR_EVER), name=name)
        options = {"name": name, "op": hvd.Sum, "sync": EVERYBODY, "prescale_factor": 0.1, "postscale_factor": 10.0}
        return hvd.partial_allreduce([tensor, tensor[:1]] if kind == "several" else tensor, **options)

    module = tf.Module()
    module.reduce = tf.function(reduce, input_signature=[tf.TensorSpec([3], tf.float32)])
    first = lambda results: (results[0] if kind == "several" else results).numpy()
    assert first(module.reduce(tf.ones([3]))) == pytest.approx([world.size] * 3)
    tf.saved_model.save(module, str(tmp_path / "module"))
    loaded = tf.saved_model.load(str(tmp_path / "module"))
    for module_or_loaded in (loaded, module, loaded):
        assert first(module_or_loaded.reduce(tf.ones([3]))) == pytest.approx([world.size] * 3)
    assert FRONT.completed(name) == 4


@modes
def test_i5_full_has_horovods_bits(world: World, graph: bool) -> None:
    name = f"full.{graph}"  # in a graph Horovod makes a scope of it, which may not have brackets
    integers = tf.constant(np.random.default_rng(world.rank).integers(-1000, 1000, 999), tf.int64)
    theirs = horovod.tensorflow.allreduce(integers, name=f"{name}.theirs", op=hvd.Sum)
    for policy in (hvd.Full(), "full", None):
        ours = run_as(graph, lambda x, p=policy: hvd.partial_allreduce(x, f"{name}.ours", hvd.Sum, sync=p))(integers)
        assert np.array_equal(ours.numpy(), theirs.numpy())
    assert f"{name}.ours" not in hvd.partial_stats()


def test_full_of_several_tensors(world: World) -> None:
    tensors = [tf.fill([3], world.rank + 1.0), tf.constant([[1.0 * world.rank]])]
    one, two = hvd.partial_allreduce(tensors, name=world.name(), op=hvd.Sum, sync="full")
    assert one.numpy().tolist() == [expected_sum(world)] * 3
    assert two.numpy().tolist() == [[sum(world.ranks)]]


def test_full_has_all_operations_and_no_rounds(world: World) -> None:
    largest = hvd.partial_allreduce(tf.constant([world.rank]), name=world.name(), op=hvd.Max, sync="full")
    assert largest.numpy().tolist() == [world.size - 1]
    with pytest.raises(ValueError, match="no rounds under Full"):
        hvd.partial_allreduce(tf.constant([1.0]), name=world.name("info"), sync="full", return_info=True)


# --- Models -----------------------------------------------------------------------------------------------------------


@modes
def test_steps_in_a_tensor(world: World, graph: bool) -> None:
    steps_of, policy = [2 + rank for rank in world.ranks], hvd.WeightedAverage(1, 0.7)

    def average(tensor: tf.Tensor, steps: tf.Tensor) -> Any:
        return hvd.average(tensor, policy, name=world.name(), steps=steps, return_info=True)

    model = tf.constant([10.0**world.rank, 1.0], tf.float64)
    result, info = run_as(graph, average)(model, tf.constant(steps_of[world.rank]))
    shares = _core.contraction_weights(steps_of, 0.7)
    expected = sum(share * 10.0**rank for rank, share in enumerate(shares))
    assert result.numpy() == pytest.approx([expected, 1.0], rel=1e-6)
    assert info.work.numpy().tolist() == steps_of


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.bfloat16], ids=name_of)
def test_models_of_several_tensors(world: World, dtype: Any) -> None:
    results = hvd.average(several(dtype, world.rank + 1), hvd.PartialReduce(world.size), name=world.name())
    mean = expected_sum(world) / world.size
    for result, one in zip(results, several(tf.float32, 1), strict=True):
        assert (result.dtype, result.shape) == (dtype, one.shape)
        assert np.allclose(tf.cast(result, tf.float32), one * mean, rtol=1e-2)


@alone
@modes
def test_tensors_of_several_types(world: World, graph: bool) -> None:
    reduce = run_as(graph, lambda *x: hvd.partial_allreduce(x, name=world.name(), sync=EVERYBODY))
    with pytest.raises(ValueError, match="must have one dtype"):
        reduce(tf.zeros([2]), tf.zeros([2], tf.float64))
    with pytest.raises(ValueError, match="must have one dtype"):
        reduce()


@modes
def test_different_shapes_of_several_tensors(world: World, graph: bool) -> None:
    """Their messages are of one length, but what is in them differs."""
    shapes = ([3], [2]) if world.rank == 0 else ([2], [3])
    call = lambda: hvd.partial_allreduce([tf.ones(shape) for shape in shapes], name=world.name(), sync=EVERYBODY)
    with pytest.raises(tf.errors.UnknownError if graph else hvd.HorovodInternalError, match="shape"):
        run_as(graph, call)()
    FRONT.check_that_the_job_goes_on(world)


@alone
@modes
def test_several_tensors_under_a_name_bound_to_others(world: World, graph: bool) -> None:
    """The message is as long, but a rank that is late would get what it has missed in other pieces."""
    reduce = run_as(graph, lambda *x: hvd.partial_allreduce(x, name=world.name(), sync=EVERYBODY))
    reduce(tf.zeros([3]), tf.zeros([2]))
    with pytest.raises(tf.errors.InvalidArgumentError if graph else ValueError, match="is bound to another"):
        reduce(tf.zeros([2]), tf.zeros([3]))


def test_an_error_beside_another_bucket(world: World) -> None:
    """One graph: what fails in it takes nothing else with it."""
    shape = [2, 3] if world.rank == 1 else [6]
    good = {"name": world.name("good"), "op": hvd.Sum, "sync": "solo"}
    hvd.partial_allreduce(tf.zeros([1]), **good)

    @tf.function
    def reduce() -> list[tf.Tensor]:
        bad = hvd.partial_allreduce(tf.zeros(shape), name=world.name("bad"), sync="solo")
        return [bad, hvd.partial_allreduce(tf.ones([1]), **good)]

    for _ in range(3):
        with pytest.raises(tf.errors.UnknownError, match="shape"):
            reduce()
        world.barrier()
    FRONT.check_that_the_job_goes_on(world)


@alone
@modes
def test_not_differentiable(world: World, graph: bool) -> None:
    def differentiate(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.partial_allreduce(x, name=world.name(), sync=EVERYBODY)
        return tape.gradient(y, x)

    with pytest.raises(LookupError, match="HorovodPartialArrive"):
        run_as(graph, differentiate)(tf.ones([2]))
    FRONT.check_that_the_job_goes_on(world)


@alone
def test_what_autograph_takes_is_silent(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """It converts what it meets, and warns of what it cannot."""

    @tf.function
    def reduce(x: tf.Tensor) -> Any:
        policy = hvd.GroupAverage(schedule=hvd.Schedule(lambda round, rank: 0, 1))
        return hvd.average(hvd.partial_allreduce(x, world.name(), sync="solo"), policy, world.name("two"))

    reduce(tf.ones([2]))
    assert "AutoGraph could not transform" not in caplog.text


@alone
def test_xla_is_refused(world: World) -> None:
    reduce = tf.function(lambda x: hvd.partial_allreduce(x, name=world.name(), sync="solo"), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"):
        reduce(tf.ones([2]))
    FRONT.check_that_the_job_goes_on(world)


@alone
def test_a_warning_about_a_tape_names_the_users_line(world: World) -> None:
    """Also in a graph that AutoGraph has converted."""

    @tf.function
    def make(x: tf.Tensor) -> tf.Tensor:
        hvd.DistributedGradientTape(tf.GradientTape(), sync="solo")
        return x

    for function in (make, make.python_function):
        with pytest.warns(UserWarning, match="a tape adds up") as caught:
            function(tf.ones([1]))
        assert [warning.filename for warning in caught] == [__file__]


@alone
def test_join_in_a_graph_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="outside of graphs"):
        tf.function(lambda: hvd.join())()


# --- Several tensors, several buckets ----------------------------------------------------------------------------------


@scripted
@modes
@pytest.mark.parametrize("dtype", [tf.int64, tf.float16, tf.bfloat16], ids=name_of)
def test_several_tensors_of_a_late_rank(world: World, dtype: Any, graph: bool) -> None:
    late = 1
    name = world.name()
    options = {"name": name, "op": hvd.Sum, "sync": all_but(late, world)}
    reduce = run_as(graph, lambda *x: hvd.partial_allreduce(x, **options))
    assert equal(reduce(*several(dtype, 0)), several(dtype, 0))
    world.barrier()
    if world.rank == late:
        world.until(lambda: FRONT.completed(name) >= 2, "round 1 has ended here")
    assert equal(reduce(*several(dtype, world.rank + 1)), several(dtype, expected_sum(world) - late - 1))
    hvd.flush()
    assert equal(reduce(*several(dtype, 0)), several(dtype, late + 1))


@scripted
def test_buckets_of_a_graph_are_late_on_their_own(world: World) -> None:
    late = 1
    options: dict[str, Any] = {"op": hvd.Sum, "return_info": True}
    names = [world.name("one"), world.name("two")]
    syncs = [all_but(late, world), EVERYBODY]

    @tf.function
    def reduce(x: tf.Tensor) -> list[Any]:
        return [hvd.partial_allreduce(x, n, sync=s, **options) for n, s in zip(names, syncs, strict=True)]

    alone = [lambda x, i=i: hvd.partial_allreduce(x, names[i], sync=syncs[i], **options) for i in range(2)]
    reduce(tf.constant([0.0]))
    world.barrier()
    mine = tf.constant([float(value(world.rank))])
    if world.rank == late:
        world.until(lambda: FRONT.completed(names[0]) >= 2, "the others' round has ended here")
        world.tell("late")
        (one, info_one), (two, info_two) = reduce(mine)
    else:
        one, info_one = alone[0](mine)
        world.wait_for("late")
        two, info_two = alone[1](mine)
    assert one.numpy().item() == total(world, without=late)
    assert two.numpy().item() == total(world)
    assert info_one.late.numpy() == (world.rank == late)
    assert info_two.late.numpy() == 0
    hvd.flush()


@scripted
@pytest.mark.parametrize("closing", [0, 1])
def test_buckets_of_a_graph_do_not_wait_for_each_other(world: World, closing: int) -> None:
    """[closing] is the bucket that the other ranks come to first; the graph may have it before or behind the other."""
    names = [world.name("one"), world.name("two")]
    call = lambda x, name: hvd.partial_allreduce(x, name, op=hvd.Sum, sync=EVERYBODY)
    both = tf.function(lambda x: [call(x, name) for name in names])
    if world.rank == 0:
        results = both(tf.constant([1.0]))
    else:
        results = [None, None]
        for i in (closing, 1 - closing):
            results[i] = call(tf.constant([1.0]), names[i])
    assert [result.numpy().item() for result in results] == [world.size] * 2


# --- Invariants, with delays of the ranks' own ------------------------------------------------------------------------


@modes
def test_i1_of_several_tensors(world: World, graph: bool) -> None:
    """They are one contribution: each is delivered once, with the others."""
    rng = random.Random(world.random().random() + world.rank)
    generator = np.random.default_rng(rng.randrange(2**32))
    name = world.name()
    call = run_as(graph, lambda *tensors: hvd.partial_allreduce(tensors, name, op=hvd.Sum, sync="solo"))
    submitted = np.zeros((2, 7), np.int64)  # 56 bytes each, which are padded to 64
    delivered = np.zeros((2, 7), np.int64)
    for _ in range(200 if world.long else 30):
        delay(rng)
        own = generator.integers(-1000, 1000, (2, 7))
        submitted += own
        delivered += np.array([result.numpy() for result in call(*map(tf.constant, own))])
    hvd.flush()
    delivered += FRONT.collect(name, np.zeros(16, np.int64)).reshape(2, 8)[:, :7]
    totals = np.array(world.gather(submitted.tolist())).sum(0)
    assert delivered.tolist() == totals.tolist()


@modes
def test_i8_on_time_means_no_extra_copy(world: World, graph: bool) -> None:
    """Nothing is kept: the bucket into which several tensors are packed is what travels."""
    name = world.name()

    def step(value: tf.Tensor) -> Any:
        values = [value + number for number in range(3)]
        return hvd.partial_allreduce(values, name=name, sync="quorum:1.0", return_info=True)

    call = run_as(graph, step)
    for _ in range(5):
        world.barrier()
        _, info = call(tf.ones([1000]))
        assert not info.late.numpy()
    assert hvd.partial_stats()[name]["bytes_held"] == 0


# --- Elastic jobs (whole ones are in test_jobs.py) ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tf", "keras"])
def test_elastic_state(world: World, kind: str) -> None:
    variables = [variable_of(kind)([world.rank + number]) for number in (1.0, 2.0)]
    state = hvd.elastic.TensorFlowState(variables, step=world.rank)

    def values() -> list[float]:
        return [variable.numpy().item() for variable in variables] + [state.step]

    state.sync()
    assert values() == [1, 2, 0]
    for commits in (False, True):
        for variable in variables:
            variable.assign([7.0])
        state.step = 7
        if commits:
            state.save()
        state.restore()
        assert values() == ([7, 7, 7] if commits else [1, 2, 0])


def test_elastic_state_of_a_model(world: World) -> None:
    need_keras_3()
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="built first"):
        hvd.elastic.TensorFlowKerasState(model)
    model.build((1, 2))
    with pytest.raises(ValueError, match="pass the optimizer"):
        hvd.elastic.TensorFlowKerasState(model)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    with pytest.raises(ValueError, match="optimizer must be one of Keras 3, not <object"):
        hvd.elastic.TensorFlowKerasState(model, object())
    state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
    model.set_weights([np.full_like(weight, world.rank) for weight in model.get_weights()])
    model.optimizer.iterations.assign(world.rank + 3)
    state.sync()
    assert all((weight == 0).all() for weight in model.get_weights())
    assert int(model.optimizer.iterations) == 3


# --- Tape -------------------------------------------------------------------------------------------------------------


def make_variables(kind: str = "tf") -> list[Any]:
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=shape).astype("float32") for shape in ((4, 3), (3,), (3, 2))]
    # Horovod's groups go by the names of TensorFlow's.
    names = ("kernel", "bias", "out")
    return [variable_of(kind)(array, name=name) for array, name in zip(arrays, names, strict=True)]


def loss_of(variables: Sequence[Any], x: Any, y: Any) -> tf.Tensor:
    kernel, bias, out = [tf.convert_to_tensor(native(variable)) for variable in variables]
    return tf.reduce_mean((tf.matmul(tf.tanh(tf.matmul(x, kernel) + bias), out) - y) ** 2)


def reference(world: World, variables: Sequence[Any], step: int) -> list[np.ndarray]:
    """The gradients of one process on the joined batch."""
    with tf.GradientTape() as tape:
        loss = loss_of(variables, *joined(world, step))
    return [gradient.numpy() for gradient in tape.gradient(loss, [native(variable) for variable in variables])]


def stepper(graph: bool, variables: Sequence[Any], **options: Any) -> Callable[[Any, Any], list[tf.Tensor]]:
    """A function of a batch that returns combined gradients."""

    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)

    return run_as(graph, step)


def close(results: Sequence[Any], expected: Sequence[np.ndarray], tolerance: float = 1e-5) -> bool:
    return all(np.allclose(one, other, atol=tolerance) for one, other in zip(results, expected, strict=True))


@pytest.mark.launch(full_ranks=(2, 4))
def test_two_tapes_in_one_graph(world: World) -> None:
    """A step of two models that are trained against each other: a graph that waits for one may compute for the other."""
    variables = [tf.Variable(1.0), tf.Variable(1.0)]

    def computed(index: int) -> tf.Tensor:
        def compute() -> np.ndarray:
            if world.rank % 2 == index:
                time.sleep(0.05)  # ten times as long as it takes until a wait counts
            return np.float32(world.rank)

        return tf.ensure_shape(tf.numpy_function(compute, [], tf.float32), [])

    @tf.function
    def step() -> list[tf.Tensor]:
        gradients = []
        for index, variable in enumerate(variables):
            with tf.GradientTape() as tape:
                loss = variable * computed(index)
            tape = hvd.DistributedGradientTape(tape, sync=hvd.Quorum(1.0))
            gradients += tape.gradient(loss, [variable])
        return gradients

    before = {name: stats["closed_by"].get("liveness", 0) for name, stats in hvd.partial_stats().items()}
    for _ in range(6):
        assert [gradient.numpy() for gradient in step()] == [sum(world.ranks) / world.size] * 2
    after = {name: stats["closed_by"].get("liveness", 0) for name, stats in hvd.partial_stats().items()}
    assert all(count == before.get(name, 0) for name, count in after.items()), after
    world.barrier()


on_time = pytest.mark.parametrize("policy", ["full", EVERYBODY])


@modes
@pytest.mark.parametrize("policy", ["solo", "majority"])
def test_tape_delivers_every_gradient_once(world: World, policy: str, graph: bool) -> None:
    rng = random.Random(world.random().random() + world.rank)
    variables = make_variables()
    before = set(hvd.partial_stats())
    gradients = stepper(graph, variables, sync=policy)
    delivered = [np.zeros(variable.shape) for variable in variables]
    expected = [np.zeros(variable.shape) for variable in variables]
    for step in range(12):
        delay(rng)
        for one, gradient in zip(delivered, gradients(*batch(world.rank, step)), strict=True):
            one += gradient.numpy()
        for one, whole in zip(expected, reference(world, variables, step), strict=True):
            one += whole
    hvd.flush()
    (name,) = set(hvd.partial_stats()) - before
    rest = FRONT.collect(name, np.zeros(48, np.float32))  # in reverse order, each from a multiple of 64 bytes on
    for one, begin in zip(delivered, (32, 16, 0), strict=True):
        one += rest[begin : begin + one.size].reshape(one.shape)
    assert close(delivered, expected)


@on_time
def test_a_wrapped_tape_records(world: World, policy: str) -> None:
    variables = make_variables()
    with hvd.DistributedGradientTape(tf.GradientTape(), sync=policy) as tape:
        loss = loss_of(variables, *batch(world.rank, 0))
    assert isinstance(tape, tf.GradientTape)
    assert close(tape.gradient(loss, variables), reference(world, variables, 0))


@on_time
def test_tape_without_any_gradient(world: World, policy: str) -> None:
    variable = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = tf.constant(1.0)
    assert hvd.DistributedGradientTape(tape, sync=policy).gradient(loss, [variable]) == [None]


@on_time
def test_further_arguments_of_gradient(world: World, policy: str) -> None:
    used, unused = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
    with tf.GradientTape() as tape:
        y = used * 2.0
    gradients = hvd.DistributedGradientTape(tape, sync=policy).gradient(
        y,
        [used, unused],
        output_gradients=tf.fill([2], world.rank + 1.0),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    assert gradients[0].numpy() == pytest.approx(2.0 * expected_sum(world) / world.size)
    assert gradients[1].numpy().tolist() == [0.0]


@on_time
@modes
def test_nested_sources(world: World, policy: str, graph: bool) -> None:
    variables = make_variables()
    nested = {"out": variables[2], "hidden": [variables[0], (variables[1],)]}

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(variables, x, y)
        tape = hvd.DistributedGradientTape(tape, sync=policy)
        return tape.gradient(loss, nested), tape.gradient(loss, variables[1])

    gradients, alone = run_as(graph, step)(*batch(world.rank, 0))
    expected = reference(world, variables, 0)
    assert close([gradients["hidden"][0], gradients["hidden"][1][0], gradients["out"]], expected)
    assert close([alone], [expected[1]])


@on_time
@modes
def test_persistent_tape(world: World, policy: str, graph: bool) -> None:
    """Twice for the same variables: two rounds of the same buckets."""
    variables = make_variables()

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(variables, x, y)
            double = 2.0 * loss
        tape = hvd.DistributedGradientTape(tape, sync=policy)
        return tape.gradient(loss, variables), tape.gradient(double, variables)

    call = run_as(graph, step)
    for number in range(2):
        once, twice = call(*batch(world.rank, number))
        expected = reference(world, variables, number)
        assert close(once, expected)
        assert close(twice, [2.0 * one for one in expected])


@modes
def test_two_tapes_around_one(world: World, graph: bool) -> None:
    """Each has its own policy and operation."""
    variables = make_variables()

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(variables, x, y)
        average = hvd.DistributedGradientTape(tape, sync="full")
        total = hvd.DistributedGradientTape(tape, sync=EVERYBODY, op=hvd.Sum)
        return average.gradient(loss, variables), total.gradient(loss, variables)

    averages, totals = run_as(graph, step)(*batch(world.rank, 0))
    expected = reference(world, variables, 0)
    assert close(averages, expected)
    assert close(totals, [world.size * one for one in expected])


@on_time
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", ["tf", "keras"])
def test_local_sources(world: World, policy: str, scaled: bool, kind: str) -> None:
    variables = make_variables(kind)
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(variables, *batch(world.rank, 0))
    own = tape.gradient(loss, [native(variable) for variable in variables])
    tape = hvd.DistributedGradientTape(tape, sync=policy, scale_local_gradients=scaled)
    tape.register_local_source(variables[1])
    expected = reference(world, variables, 0)
    expected[1] = own[1].numpy() / (world.size if scaled else 1)
    assert close(tape.gradient(loss, variables), expected)
    local, shared = tape.get_local_and_global_gradients(loss, variables)
    assert [source is variables[1] for source, _ in local] == [True]
    assert close([gradient for _, gradient in local], expected[1:2])
    assert close([gradient for _, gradient in shared], [expected[0], expected[2]])


@alone
def test_only_local_sources(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has a sparse gradient. Nothing travels, so no other ranks are needed."""
    monkeypatch.setattr(runtime, "size_of", lambda process_set: 4)
    weight, table = tf.Variable([1.0]), tf.Variable([[1.0], [1.0]])
    with tf.GradientTape(persistent=True) as tape:
        loss = (weight + tf.gather(table, [1])) * 3.0
    for scaled, expected in ((True, 0.75), (False, 3.0)):
        wrapped = hvd.DistributedGradientTape(tape, sync=EVERYBODY, scale_local_gradients=scaled)
        for source in (weight, table):
            wrapped.register_local_source(source)
        dense, sparse = wrapped.gradient(loss, [weight, table])
        assert isinstance(sparse, tf.IndexedSlices)
        assert dense.numpy().tolist() == [expected]
        assert tf.convert_to_tensor(sparse).numpy().tolist() == [[0.0], [expected]]


@alone
def test_arguments_of_a_wrong_kind_of_operations(world: World) -> None:
    numbers: list[Any] = ["1", True, None, [1], float]
    counts: list[Any] = ["1", 1.5, True, [1], int]
    common = {"name": NONSENSE["name"], "process_set": NONSENSE["process_set"], "return_info": ["yes", None]}
    scales = {"prescale_factor": numbers, "postscale_factor": numbers}
    reduced = {name: NONSENSE[name] for name in ("op", "sync")}
    cases: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
        "partial_allreduce": ({"sync": "solo"}, reduced | scales),
        "average": (
            {"policy": hvd.WeightedAverage(1, 0.5), "steps": 1},
            {"policy": [1, None, "solo", hvd.GroupAverage], "steps": [*counts, None, tf.constant(1.0)]},
        ),
    }
    for kind, (needed, nonsense) in cases.items():
        options = {"tensor": tf.ones(2), "name": world.name(), **needed}
        check_nonsense(lambda o=options, k=kind, **wrong: getattr(hvd, k)(**(o | wrong)), common | nonsense)
    assert world.name() not in hvd.partial_stats()


@alone
@pytest.mark.parametrize(
    ("options", "warns"),
    [({"sync": "solo"}, True), ({"sync": "quorum:1.0,max_staleness=2"}, False), ({"sync": "full"}, False)],
)
def test_sums_that_nobody_asked_for_are_told(world: World, options: dict[str, Any], warns: bool) -> None:
    need_keras_3()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.DistributedGradientTape(tf.GradientTape(), **options)
        hvd.DistributedOptimizer(keras.optimizers.Adam(), **options)
    told = [one for one in caught if "So replicas part" in str(one.message)]
    assert len(told) == int(warns)


@alone
def test_optimizers_of_tensorflow_1(world: World) -> None:
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match=r"takes hvd.Full\(\)"):
        hvd.DistributedOptimizer(optimizer, sync="solo")
    assert isinstance(hvd.DistributedOptimizer(optimizer), tf.compat.v1.train.Optimizer)


@alone
def test_keras_2_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "__version__", "2.15.0")
    monkeypatch.delitem(sys.modules, "horovod_partial.keras", raising=False)
    with pytest.raises(ImportError, match=r"needs Keras 3, and Keras 2\.15\.0 is installed: install TensorFlow 2\.16"):
        importlib.import_module("horovod_partial.keras")
    with pytest.raises(ImportError, match="needs Keras 3"):
        hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ImportError, match="needs Keras 3"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential())


def test_a_dataset_of_balanced_batches(world: World) -> None:
    samples = 20 * world.size - 1
    sampler = hvd.BalancedBatchSampler(range(samples), 5)
    numbers = tf.data.Dataset.from_generator(lambda: sampler, output_signature=tf.TensorSpec((None,), tf.int64))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found = world.gather([batch.tolist() for batch in numbers.as_numpy_iterator()])
        epochs.append({sample for batches in found for batch in batches for sample in batch})
    assert epochs == [set(range(samples))] * 2
    other = hvd.BalancedBatchSampler(range(world.rank, world.rank + 40), 5)
    wrong = tf.data.Dataset.from_generator(lambda: other, output_signature=tf.TensorSpec((None,), tf.int64))

    def train() -> None:
        for epoch in itertools.count():
            other.set_epoch(epoch)
            for _ in wrong:
                time.sleep(0.01)

    with pytest.raises(tf.errors.InvalidArgumentError, match="with other lengths or arguments than rank 0"):
        train()
