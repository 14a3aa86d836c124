"""Which ranks are slow, and in what way: jobs drawn from a seed, and some that were made by hand."""

import re
from pathlib import Path

import numpy as np
import pytest
import synthetic_recordings as synthetic
from numpy.typing import NDArray

from horovod_partial import _core
from horovod_partial.insight.report import slowness
from horovod_partial.insight.simulate import RecordedSteps

RANKS = 8


def kinds(compute: NDArray[np.float64]) -> list[str]:
    return [
        rank.worst.kind if rank.worst else "none" for rank in slowness.of_job(list(range(compute.shape[1])), compute)
    ]


def job_with_three_slow_ranks(seed: int) -> tuple[NDArray[np.float64], list[str]]:
    """Compute times, and the kind of each rank."""
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(200, 1001))
    seconds, noise = float(10 ** rng.uniform(-2, 0)), float(rng.uniform(0.005, 0.05))
    compute = synthetic.even(steps, RANKS, seconds, noise, seed)
    at_random, always, in_bursts = (int(rank) for rank in rng.permutation(RANKS)[:3])
    factors, share = rng.uniform(1.3, 3.0, 3), float(rng.uniform(0.05, 0.3))
    compute[rng.random(steps) < share, at_random] *= factors[0]
    compute[:, always] *= factors[1]
    length = int(rng.integers(10, steps // 10))
    period = int(rng.integers(2 * length, steps // 3))
    for begin in range(int(rng.integers(0, period)), steps, period):
        compute[begin : begin + length, in_bursts] *= factors[2]
    expected = ["none"] * RANKS
    expected[at_random], expected[always], expected[in_bursts] = "random", "persistent", "bursts"
    print(f"seed {seed}: {steps} steps of {seconds:.3f} s, noise {noise:.1%}, factors {factors.round(2)}")
    print(f"random steps {share:.0%}, bursts of {length} every {period}, ranks {at_random}, {always}, {in_bursts}")
    return compute, expected


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_of_slowness_is_named(seed: int) -> None:
    compute, expected = job_with_three_slow_ranks(seed)
    assert kinds(compute) == expected


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_slowness(seed: int) -> None:
    print("seed", seed)
    compute = synthetic.even(200 + 40 * seed, RANKS, noise=0.05, seed=seed)
    assert kinds(compute) == ["none"] * RANKS


def test_scores_are_shares_of_the_fastest_ranks_mean() -> None:
    compute = np.full((100, 3), 0.1)
    compute[:, 1] = 0.2
    compute[::5, 2] = 0.3  # the median is that of rank 0
    assert [rank.score for rank in slowness.of_job([0, 1, 2], compute)] == pytest.approx([1.0, 0.5, 0.1 / 0.14])


def test_a_rank_has_an_interval_and_the_steps_behind_it() -> None:
    compute = synthetic.even(200, 4, noise=0.03)
    compute[:, 2] *= 1.5
    slow = slowness.of_job([10, 11, 12, 13], compute)[2]
    assert slow.rank == 12
    assert slow.always
    assert slow.worst is not None
    assert slow.worst.rank == 12
    assert 1.47 < slow.worst.low < slow.factor < slow.worst.high < 1.53
    assert (slow.worst.steps, slow.worst.length) == (200, 200)
    assert re.fullmatch(
        r"takes 1\.\d\d times \(95 %: 1\.\d\d to 1\.\d\d\) as long as the median rank, in 200 of 200 steps since step 0",
        str(slow),
    )


def test_bursts_have_a_length_and_a_period() -> None:
    compute = synthetic.even(600, 4)
    for begin in range(20, 600, 90):
        compute[begin : begin + 25, 2] *= 2.0
    burst = slowness.of_job([0, 1, 2, 3], compute)[2]
    assert burst.worst is not None
    assert (burst.worst.kind, burst.worst.burst, burst.worst.period) == ("bursts", 25, 90)
    assert burst.factor == pytest.approx(2.0, rel=0.05)
    assert not burst.always
    assert str(burst).endswith(", in bursts of 25 steps every 90")


@pytest.mark.parametrize("seed", range(10))
def test_bursts_beside_noise_begin_with_the_first(seed: int) -> None:
    print("seed", seed)
    rng = np.random.default_rng(seed)
    compute = np.full((260, 4), 0.05)
    compute[:, 3] *= 1.6
    compute[np.arange(260) % 50 >= 35, 1] *= 2.5
    compute = (compute + 0.003) * rng.lognormal(0.0, 0.03, compute.shape)
    compute += np.where(rng.random(compute.shape) < 0.3, rng.exponential(0.02, compute.shape), 0.0)
    for begin, steps in ((35, compute), (85, np.r_[compute[:35], compute[:15], compute[50:]])):
        worst = slowness.of_job([0, 1, 2, 3], steps)[1].worst
        assert worst
        assert (worst.kind, worst.begin) == ("bursts", pytest.approx(begin, abs=4))


def test_a_rank_that_was_slow_twice_is_described_by_the_worse_time() -> None:
    compute = synthetic.even(1200, 4)
    compute[20:40, 1] *= 2.0
    compute[1000:1060, 1] *= 2.0  # too long after the first time to be another burst
    slow = slowness.of_job([0, 1, 2, 3], compute)[1]
    assert [(time.kind, time.begin) for time in slow.times] == [("persistent", 20), ("persistent", 1000)]
    assert str(slow).endswith(" from step 1000 to 1059 (the worst of 2 times)")


def test_steps_that_are_long_for_all_make_nobody_slow() -> None:
    compute = synthetic.even(400, 4)
    compute *= np.random.default_rng(1).uniform(1.0, 2.0, 400)[:, None]  # batches of other lengths
    compute[::50] *= 5.0
    assert kinds(compute) == ["none"] * 4
    compute[np.random.default_rng(2).random(400) < 0.1, 3] *= 1.6
    assert kinds(compute) == ["none", "none", "none", "random"]


def test_single_steps_far_out_are_no_kind() -> None:
    compute = synthetic.even(400, 4)
    compute[[100, 300], 0] *= 50.0  # checkpoints
    assert kinds(compute) == ["none"] * 4
    compute[np.random.default_rng(3).random(400) < 0.1, 0] *= 1.5
    assert kinds(compute) == ["random", "none", "none", "none"]


def test_few_steps_are_enough_where_a_rank_is_much_slower() -> None:
    compute = synthetic.even(12, 4)
    compute[:, 1] *= 3.0
    assert kinds(compute[:4]) == ["none"] * 4
    assert kinds(compute) == ["none", "persistent", "none", "none"]


@pytest.mark.parametrize("every", [10, 25, 100])
def test_steps_that_are_long_for_all_are_nobodys_slowness(every: int) -> None:
    compute = synthetic.even(300, 4)
    compute[::every] += 1.0
    assert kinds(compute) == ["none"] * 4


def test_a_rank_whose_short_steps_alone_are_longer_is_not_slow() -> None:
    compute = synthetic.even(240, 4)
    compute[::2] *= 0.05  # as in a training of two networks by turns
    compute[::2, 1] *= 1.15
    assert kinds(compute) == ["none"] * 4


def like_sentences(seed: int, ranks: int = RANKS) -> NDArray[np.float64]:
    """Times of samples whose lengths are drawn from one log-normal distribution."""
    print("seed", seed)
    return 0.1 * np.random.default_rng(seed).lognormal(0.0, 0.4, (300, ranks))


def follows_data(compute: NDArray[np.float64]) -> bool:
    return slowness.follows_data(compute, slowness.of_job(list(range(compute.shape[1])), compute))


@pytest.mark.parametrize("seed", range(10))
def test_samples_that_differ_are_told_from_machines(seed: int) -> None:
    compute = like_sentences(seed)
    assert follows_data(compute)
    slow, busy, shaky, few = (compute.copy() for _ in range(4))
    slow[:, 2] *= 1.5
    assert not follows_data(slow)
    for begin in range(0, len(busy), 60):
        busy[begin : begin + 30, 2] *= 1.8
    assert not follows_data(busy)
    shaky[:, 2] = 0.1 * np.exp(2 * np.log(shaky[:, 2] / 0.1))
    assert not follows_data(shaky)
    assert not follows_data(few[:20])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_few_ranks_with_samples_that_differ(seed: int, ranks: int) -> None:
    compute = like_sentences(seed, ranks)
    assert kinds(compute) == ["none"] * ranks
    assert follows_data(compute)


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_hiccups_are_no_samples(seed: int) -> None:
    print("seed", seed)
    compute = synthetic.even(300, RANKS, noise=0.05, seed=seed)
    assert not follows_data(compute)
    compute[np.random.default_rng(seed).random(compute.shape) < 0.1] *= 3
    assert not follows_data(compute)


# Rare pauses


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("matrix") == "full")


@pytest.fixture
def seeds(is_long: bool) -> range:
    return range(40 if is_long else 1)


def alike(kind: str, steps: int, ranks: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Compute times of ranks that are alike, in usual steps, of the shape (steps, ranks)."""
    shape = (steps, ranks)
    even = rng.normal(1.0, 0.1 if kind == "noise of 10 %" else 0.03, shape).clip(0.5)
    if kind.startswith("log-normal"):
        return rng.lognormal(0.0, float(kind.split()[1]), shape)
    if kind == "spikes":
        return even * np.where(rng.random(shape) < 0.01, 5.0, 1.0)
    if kind == "exponential pauses":
        return even + np.where(rng.random(shape) < 0.002, rng.exponential(20.0, shape), 0.0)
    if kind == "Pareto pauses":
        return even + np.where(rng.random(shape) < 0.002, 2.0 * rng.pareto(1.2, shape), 0.0)
    if kind == "bursts":
        begins = rng.random(shape) < 0.0005
        for step, rank in np.argwhere(begins):
            even[step : step + 20, rank] *= 3.0
    return even


ALIKE = (
    *("noise of 3 %", "noise of 10 %", "spikes", "exponential pauses", "Pareto pauses", "bursts"),
    *("log-normal 0.3", "log-normal 0.6", "log-normal 1.0"),  # the last two: samples that differ
)


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize(("ranks", "steps"), [(2, 12_000), (4, 12_000), (8, 12_000), (32, 6_000), (512, 1_500)])
def test_ranks_that_pause_alike_are_not_told_to_pause(
    kind: str, ranks: int, steps: int, seeds: range, is_long: bool
) -> None:
    steps //= 1 if is_long else 6
    for seed in seeds:
        compute = 0.05 * alike(kind, steps, ranks, np.random.default_rng(seed))
        found = [str(rank) for rank in slowness.of_job(list(range(ranks)), compute) if rank.kind == "pauses"]
        assert found == [], f"seed {seed}"


def told_after(compute: NDArray[np.float64]) -> tuple[int, str]:
    """After how many steps a rank is first told to pause, and what is told."""
    detector = _core.SlowRanks(compute.shape[1])
    for step, seconds in enumerate(compute):
        for _, found in detector.step(seconds):
            if found.kind == "pauses":
                assert found.rank == 0
                return step + 1, found.describe()
    return -1, "nothing"


@pytest.mark.parametrize("kind", ["noise of 3 %", "log-normal 0.3", "spikes"])
@pytest.mark.parametrize(("ranks", "pauses"), [(2, 16), (4, 9), (8, 6), (32, 5)])
def test_a_rank_that_pauses_is_told_after_few_pauses(kind: str, ranks: int, pauses: int, seeds: range) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        compute = alike(kind, 50 * pauses, ranks, rng)
        compute[49::50, 0] += 60.0 * rng.uniform(0.8, 1.2, pauses)
        assert told_after(0.04 * compute)[0] > 0, f"seed {seed}"


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 20.0])
def test_pauses_are_told_with_their_length_and_cost(seconds: float, cost: float, seeds: range) -> None:
    every = round(seconds * (1 - cost) / cost / 0.05)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        compute = 0.05 * alike("noise of 3 %", 7 * every, RANKS, rng)
        compute[int(rng.integers(every)) :: every, 0] += seconds
        _, told = told_after(compute)
        figures = re.fullmatch(
            r"pauses for (\S+) s every (\d+) steps: the others wait for it for (\d+) % of the time, .*", told
        )
        assert figures, f"seed {seed}: {told}"
        assert float(figures[1]) == pytest.approx(seconds, rel=0.02)
        assert int(figures[2]) == every
        assert int(figures[3]) == pytest.approx(100 * cost, abs=3)


def test_pauses_are_a_kind_in_reports() -> None:
    compute = synthetic.even(600, 4, 0.04)
    compute[49::50, 1] += 5.0
    compute[:, 2] *= 1.6
    slow = slowness.of_job([0, 1, 2, 3], compute)
    assert [rank.worst.kind if rank.worst else "none" for rank in slow] == ["none", "pauses", "persistent", "none"]
    assert [rank.kind == "pauses" for rank in slow] == [False, True, False, False]
    assert not slow[1].always
    assert slow[1].factor == pytest.approx(1 + 5.0 / (50 * 1.6 * 0.04), rel=0.1)


def recorded(name: str) -> NDArray[np.float64]:
    """Compute times of a production job, of the shape (steps, ranks)."""
    traces = Path(__file__).parents[2] / "benchmarks" / "traces"
    return np.array(RecordedSteps.load(traces / f"{name}.csv").seconds)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_production_jobs(seed: int, noise: float) -> None:
    """In the one job rank 0 was slowed on purpose. In the other one sequences differ in length, and no rank is slow."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    both = [recorded(name) for name in ("one_worker_slowed", "sequences")]
    slowed, sequences = (times * np.exp(rng.normal(0.0, noise, times.shape)) for times in both)
    assert kinds(slowed) == ["persistent", "none", "none", "none"]
    assert kinds(sequences) == ["none"] * 32
    assert follows_data(sequences)
