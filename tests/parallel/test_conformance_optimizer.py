"""What every `DistributedOptimizer` does, and TensorFlow's tape as far as it goes: one case for all front ends.

What a loop of one framework alone has is in `test_optimizer.py`, `test_tensorflow.py` and `test_keras*.py`.
"""

import random
from typing import Any

import numpy as np
import pytest
from harness.arguments import NONSENSE, check_nonsense, check_refusals
from harness.matrix import alone, long_cases
from harness.trainers import EVERYBODY, Scripted, Trainer, batch, joined, linear, near, network, optimizers, table
from harness.world import World, delay, expected_sum

on_time = pytest.mark.parametrize("policy", ["full", EVERYBODY])


OF_MODELS = ["group_average:2", "partial_reduce:2", "weighted_average:2,contraction=0.9"]


def zeros(*sizes: int) -> list[np.ndarray]:
    return [np.zeros(size) for size in sizes]


# --- As one process would ---------------------------------------------------------------------------------------------


@on_time
def test_trains_as_one_process_would(trainer: Trainer, world: World, policy: str) -> None:
    for make in [name for name in trainer.makers if name != "unit"]:
        one = trainer.training(world, policy, make)
        one.train(3)
        expected = trainer.training(world, None, make).train_alone(3)
        assert world.same(one.weights()) == near(expected.weights()), make
        if not trainer.is_tape:
            assert isinstance(one.optimizer, type(expected.optimizer))
            assert one.state() == near(expected.state()), make
            assert one.optimizer.rounds == 3


@on_time
@pytest.mark.parametrize("groups", [2, [[0, 5], [1, 2, 3, 4]], [[0, 5, 2]]], ids=["number", "lists", "some"])
def test_groups(trainer: Trainer, world: World, policy: str, groups: Any) -> None:
    before = set(trainer.hvd.partial_stats())
    one = trainer.training(world, policy, groups=groups)
    one.train(2)
    assert one.weights() == near(trainer.training(world, None).train_alone(2).weights())
    assert len(set(trainer.hvd.partial_stats()) - before) == (0 if policy == "full" else 2)


@on_time
@optimizers
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulation(trainer: Trainer, world: World, policy: str, clip: float | None) -> None:
    """One exchange for two backward passes, whose gradients are added and then clipped."""
    one = trainer.training(world, policy, passes=2, clip=clip)
    for number in range(4):
        before = one.weights()
        one.train(1, first=number)
        assert (one.weights() == before) == (number % 2 == 0)
    doubled = lambda *inputs: 2.0 * network(*inputs)
    expected = trainer.training(world, None, loss=doubled, clip=clip).train_alone(2, passes=2)
    assert one.weights() == near(expected.weights())
    assert one.optimizer.rounds == 2


@on_time
def test_compression(trainer: Trainer, world: World, policy: str) -> None:
    one = trainer.training(world, policy, compression=trainer.hvd.Compression.fp16)
    one.train(3)
    assert world.same(one.weights()) == near(trainer.training(world, None).train_alone(3).weights(), 1e-2)


@on_time
def test_predivide_factor_and_sum(trainer: Trainer, world: World, policy: str) -> None:
    for options, factor in (({"gradient_predivide_factor": 4.0}, 1 / world.size), ({"op": trainer.hvd.Sum}, 1.0)):
        one = trainer.training(world, policy, "unit", linear, zeros(3), **options)
        one.step(np.full(3, world.rank + 1.0))
        assert one.weights() == near([-factor * expected_sum(world)] * 3)


@on_time
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_parameters_without_a_gradient(trainer: Trainer, world: World, policy: str) -> None:
    arrays = [*zeros(2), np.ones(2)]
    one, expected = (trainer.training(world, sync, "momentum", linear, arrays) for sync in (policy, None))
    for _ in range(2):
        one.step(np.full(2, world.rank + 1.0))
        expected.step(np.full(2, expected_sum(world) / world.size))
    assert one.weights() == near(expected.weights())
    assert one.values()[1] == [1.0] * 2


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        *((EVERYBODY, [dtype]) for dtype in ("float16", "bfloat16", "float64")),
        *((policy, ["float32", "float64", "float16"]) for policy in ("full", EVERYBODY)),
    ],
    ids=str,
)
def test_dtypes(trainer: Trainer, world: World, policy: str, dtypes: list[str]) -> None:
    one = trainer.training(world, policy, "unit", linear, zeros(3, 2, 4), dtypes)
    one.step(*(np.full(size, world.rank + 1.0) for size in (3, 2, 4)))
    assert one.weights() == [-expected_sum(world) / world.size] * 9


@pytest.mark.trainers("torch", "keras_eager", "keras_graph", "tape_eager", "tape_graph")
@pytest.mark.parametrize(("policy", "as_dense"), [("full", False), ("full", True), (EVERYBODY, True)])
def test_sparse_gradients(trainer: Trainer, world: World, policy: str, as_dense: bool) -> None:
    one = trainer.training(world, policy, "unit", table, [np.zeros((5, 2))], sparse_as_dense=as_dense)
    for _ in range(2):
        one.step([world.rank % 5])
    counts = np.zeros((5, 2))
    for rank in world.ranks:
        counts[rank % 5] += 1
    assert one.weights() == near((-2 * counts / world.size).reshape(-1).tolist())


@pytest.mark.trainers("torch", "keras_eager", "keras_graph", "tape_eager", "tape_graph")
def test_sparse_gradients_are_refused(trainer: Trainer, world: World) -> None:
    one = trainer.training(world, "solo", "unit", table, [np.zeros((5, 2))])
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        one.step([world.rank % 5])
    check_that_the_job_goes_on(trainer, world)


@on_time
def test_two_models_of_equal_shapes(trainer: Trainer, world: World, policy: str) -> None:
    """As in a GAN: each has buckets of its own."""
    one, other = (trainer.training(world, policy) for _ in range(2))
    for number in range(2):
        one.train(1, first=number)
        other.train(1, first=number + 10)
    expected = trainer.training(world, None)
    assert one.weights() == near(expected.train_alone(2).weights())
    expected = trainer.training(world, None)
    for number in range(2):
        expected.step(*joined(world, number + 10))
    assert other.weights() == near(expected.weights())


@optimizers
def test_one_optimizer_after_another(trainer: Trainer, world: World) -> None:
    """What the first has pending or missed is none of the second's."""
    parameters = trainer.training(world).parameters
    for sync in (EVERYBODY, "solo", EVERYBODY, "group_average:2", "group_average:2,period=3"):
        one = trainer.training(world, sync, parameters=parameters)
        one.train(2)
        one.optimizer.flush()


@optimizers
@pytest.mark.parametrize("policy", ["full", "solo", EVERYBODY, *OF_MODELS])
def test_flush_before_the_first_step(trainer: Trainer, world: World, policy: str) -> None:
    one = trainer.training(world, policy)
    before = one.weights()
    one.flush()
    assert one.weights() == before


@pytest.mark.parametrize("policy", ["solo", "majority", *long_cases("quorum:0.75")])
@optimizers
def test_learns(trainer: Trainer, world: World, policy: str) -> None:
    def loss(trainer: Trainer, parameters: Any, x: Any) -> Any:
        return trainer.total((parameters[0] - trainer.like(x, parameters[0])) ** 2)

    # Steps without any compute make ranks so late on a busy machine that no rate is small enough.
    one = trainer.training(world, f"{policy}{',' if ':' in policy else ':'}max_staleness=2", "momentum", loss, zeros(3))
    noise = np.random.default_rng(world.rank)
    for _ in range(200):
        one.step(noise.normal([1.0, -2.0, 3.0], 0.1))
    one.flush()
    assert one.weights() == near([1.0, -2.0, 3.0], 0.3)


# --- Late ranks -------------------------------------------------------------------------------------------------------


@optimizers
@pytest.mark.parametrize(
    "options",
    [{}, {"passes": 2}, {"compression": "fp16"}, {"groups": 2}],
    ids=["plain", "accumulated", "compressed", "two buckets"],
)
@pytest.mark.parametrize("policy", ["solo", "majority", *long_cases("majority:random")])
def test_every_gradient_is_applied_once(trainer: Trainer, world: World, policy: str, options: dict[str, Any]) -> None:
    """Of plain SGD, which adds them up, whoever was late."""
    if "compression" in options:
        options = {"compression": trainer.hvd.Compression.fp16}
    one = trainer.training(world, policy, "unit", linear, zeros(3, 2), **options)
    rng = random.Random(world.random().random() + world.rank)
    gradients = np.random.default_rng(rng.randrange(2**32)).normal(size=(12, 5))
    for gradient in gradients:
        delay(rng)
        one.step(gradient[:3], gradient[3:])
    one.flush()
    expected = -np.mean(world.gather(gradients.sum(0)), 0)
    assert one.weights() == near(expected.tolist(), 0.1 if "compression" in options else 1e-4)
    before = one.weights()
    one.flush()  # nothing is left
    assert one.weights() == before


both = pytest.mark.parametrize("late", [0, 1])


@both
@optimizers
def test_missed_results_are_applied(trainer: Trainer, world: World, late: int) -> None:
    script = Scripted(trainer, world, late)
    script.first()
    script.rounds_without_the_late_rank(0, 1, 2)
    if script.late:
        script.step(0.0)
        assert script.way == script.total(0, 1, 2)
    script.optimizer.flush()
    world.barrier()


@optimizers
def test_a_late_rank_has_the_state_of_the_others(trainer: Trainer, world: World) -> None:
    """A late Adam takes the same steps as an Adam that was on time."""
    script = Scripted(trainer, world, 1, "Adam", replay_limit=20, max_staleness=100)
    script.first()
    script.rounds_without_the_late_rank(*range(12))
    if script.late:
        script.step(0.0)
    world.same((script.training.weights(), script.training.state()))
    script.training.flush()


@both
@optimizers
def test_flush_applies_what_was_pending_and_missed(trainer: Trainer, world: World, late: int) -> None:
    script = Scripted(trainer, world, late)
    script.first()
    script.rounds_without_the_late_rank(0, 1)
    assert script.optimizer.flushed() != script.late
    if script.late:
        script.step(0.5)
    script.training.flush()
    assert script.way == script.total(0, 1) + 0.5


@optimizers
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_a_late_gradient_that_is_not_finite_is_dropped_and_counted(trainer: Trainer, world: World, bad: float) -> None:
    script = Scripted(trainer, world, 1)
    script.first()
    script.rounds_without_the_late_rank(0)
    if script.late:
        script.step(bad)  # gets round 1, and would deliver this
        assert script.way == script.total(0)
    script.training.flush()
    assert script.way == script.total(0)
    assert world.gather(script.training.stats()["dropped"]) == [int(rank == 1) for rank in world.ranks]


# --- Scaled losses, clipping, schedules -------------------------------------------------------------------------------


@on_time
@optimizers
def test_gradients_of_one_rank_that_are_not_finite(trainer: Trainer, world: World, policy: str) -> None:
    """All ranks skip that step, and halve their scale."""
    one = trainer.training(world, policy, scale=64.0)
    one.train(1)
    before = one.weights()
    x, y = batch(world.rank, 1)
    one.step(x, y + np.float32(np.inf if world.rank == 1 else 0.0))
    assert one.weights() == before
    assert trainer.scale_of(one) == 32.0
    one.train(1, first=2)
    expected = trainer.training(world, None)
    for number in (0, 2):
        expected.step(*joined(world, number))
    assert world.same(one.weights()) == near(expected.weights())


@optimizers
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("policy", ["solo", "majority"])
def test_gradients_that_are_not_finite_and_late(trainer: Trainer, world: World, policy: str, clip: Any) -> None:
    one = trainer.training(world, policy, scale=64.0, clip=clip)
    rng = random.Random(world.random().random() + world.rank)
    for number in range(8):
        delay(rng)
        x, y = batch(world.rank, number)
        one.step(x, y + np.float32(np.inf if world.rank == number else 0.0))
    one.flush()
    world.same(trainer.scale_of(one))
    assert np.isfinite(one.weights()).all()


@on_time
@optimizers
@pytest.mark.filterwarnings("ignore:.*travel as float32")
def test_small_gradients_of_a_scaled_loss(trainer: Trainer, world: World, policy: str) -> None:
    """In float16 they would be 0 without the scale."""
    options = {"scale": 2.0**15, "compression": trainer.hvd.Compression.fp16}
    one = trainer.training(world, policy, "unit", linear, zeros(3), **options)
    one.step(np.full(3, 1e-8))
    assert one.weights() == pytest.approx([-1e-8] * 3, rel=1e-3)


@on_time
@optimizers
def test_clipping_and_a_schedule(trainer: Trainer, world: World, policy: str) -> None:
    """What is clipped is the average. `test_one_model*` have late ranks."""
    one = trainer.training(world, policy, clip=0.05, decay=0.5)
    one.train(3)
    expected = trainer.training(world, None, clip=0.05, decay=0.5).train_alone(3)
    assert world.same(one.weights()) == near(expected.weights())


# --- Arguments and errors ---------------------------------------------------------------------------------------------


@alone
@pytest.mark.parametrize("first", ["full", "solo", "group_average:2"])
def test_wrapping_twice(trainer: Trainer, world: World, first: str) -> None:
    if first == "group_average:2" and trainer.is_tape:
        pytest.skip("a tape averages no models")
    wrapped = trainer.wrap(sync=first)
    for second in ("full", "solo"):
        with pytest.raises(ValueError, match="already"):
            trainer.wrap(wrapped, sync=second)


@alone
def test_wrong_arguments(trainer: Trainer, world: World) -> None:
    check_refusals(trainer.operations, trainer.wrap, trainer.refused)


@alone
@pytest.mark.parametrize("policy", ["full", "solo", "group_average:2"])
def test_arguments_of_a_wrong_kind(trainer: Trainer, world: World, policy: str) -> None:
    """Each is refused in one line that names it; what only gradients have, where gradients travel."""
    if policy == "group_average:2" and trainer.is_tape:
        pytest.skip("a tape averages no models")
    names = trainer.arguments + ("" if policy == "group_average:2" else trainer.arguments_of_gradients)
    nonsense = {name: NONSENSE[name] for name in names.split()}
    check_nonsense(lambda **wrong: trainer.wrap(**({"sync": policy} | wrong)), nonsense)


def check_that_the_job_goes_on(trainer: Trainer, world: World) -> None:
    result = trainer.hvd.allreduce(trainer.tensor(np.ones(1)), name=world.name("after"), op=trainer.hvd.Sum)
    assert float(result[0]) == world.size


@optimizers
@pytest.mark.parametrize("scale", [None, 64.0])
def test_ranks_that_disagree(trainer: Trainer, world: World, scale: float | None) -> None:
    """The step changes nothing."""
    one = trainer.training(world, "solo" if world.rank == 1 else "majority", scale=scale)
    before = one.weights()
    with pytest.raises(trainer.disagreement, match="Mismatched sync policies"):
        one.train(1)
    assert one.weights() == before
    check_that_the_job_goes_on(trainer, world)
