"""The simulator: costs, delays, traces, and figures that are known beforehand."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import horovod_partial
from horovod_partial import cli, merging
from horovod_partial.insight.simulate import (
    Cluster,
    Gradient,
    LogNormal,
    OneSlow,
    RandomRanks,
    RecordedSteps,
    Result,
    Rotating,
    Trace,
    parse_delays,
    simulate,
)
from horovod_partial.merging import MessageCost

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
FREE = Cluster(0.0, 0.0)
# Of the MG-WFBP paper's first cluster: 16 GPUs, a = 0.972 ms, b = 1.97 ns/B.
PAPER = Cluster.fit_ring(MessageCost(9.72e-4, 1.97e-9), 16)
POLICIES = ("full", "solo", "majority", "majority:random", "quorum:3", "group_average:2", "partial_reduce:3")


def one_message(compute: float) -> Trace:
    return Trace.even(1, 4, 0.0, compute)


def resnet50() -> Trace:
    return Trace.load(TRACES / "resnet50.json").scaled(0.4)


# --- Clusters ---------------------------------------------------------------------------------------------------------


def test_a_fit_costs_what_was_measured() -> None:
    cost = PAPER.cost("ring", 16)
    assert (cost.latency, cost.seconds_per_byte) == (pytest.approx(9.72e-4), pytest.approx(1.97e-9))
    assert PAPER.cost("ring", 64).latency == pytest.approx(9.72e-4 * 63 / 15)


def test_costs_of_eight_ranks() -> None:
    cluster = Cluster(10.0, 8.0, 16.0)
    assert {name: (cost.latency, cost.seconds_per_byte) for name, cost in cluster.costs(8).items()} == {
        "ring": (2 * 7 * 10, 7 / 8 * (2 * 8 + 16)),
        "recursive_doubling": (3 * 10, (8 + 16) * 3),
        "recursive_halving_doubling": (2 * 3 * 10, 2 * 8 - (2 * 8 + 16) / 8 + 16),
        "binary_tree": (2 * 3 * 10, (2 * 8 + 16) * 3),
        "double_binary_trees": (2 * 3 * 10, 8 + 16),
    }


@pytest.mark.parametrize(("algorithm", "latencies"), [("recursive_doubling", 1), ("binary_tree", 2)])
def test_ranks_that_are_no_power_of_two_take_whole_steps(algorithm: str, latencies: int) -> None:
    cluster = Cluster(1.0, 1.0)
    steps = [cluster.cost(algorithm, ranks).latency / latencies for ranks in (2, 3, 4, 5, 8, 9, 1024, 1025)]
    assert steps == [1, 2, 2, 3, 3, 4, 10, 11]


def test_a_rank_alone_costs_nothing() -> None:
    for cost in Cluster(1.0, 1.0, 1.0).costs(1).values():
        assert (cost.latency, cost.seconds_per_byte) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Cluster(-1.0, 0.0), "latency must be 0 or more"),
        (lambda: Cluster(0.0, math.nan), "seconds_per_byte must be 0 or more"),
        (lambda: Cluster.fit_ring(MessageCost(1.0, 1.0), 1), "2 ranks or more"),
        (lambda: FREE.cost("star", 4), "algorithm must be one of 'ring', "),
        (lambda: Trace("x", 0.0, ()), "1 gradient or more"),
        (lambda: Trace("x", 0.0, (Gradient("a", 1, -1.0),)), "no negative"),
    ],
)
def test_wrong_clusters_and_traces(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


# --- Delays -----------------------------------------------------------------------------------------------------------


def test_random_ranks() -> None:
    drawn = RandomRanks(3, 0.5).draw(200, 8, 1.0, seed=0)
    assert set(np.unique(drawn)) == {0.0, 0.5}
    assert (np.count_nonzero(drawn, axis=1) == 3).all()
    assert np.count_nonzero(drawn, axis=0).min() > 0


def test_delays_that_are_not_drawn() -> None:
    assert Rotating((1.0, 2.0, 3.0)).draw(2, 3, 1.0, 0).tolist() == [[1.0, 2.0, 3.0], [2.0, 3.0, 1.0]]
    assert OneSlow(3.0).draw(1, 3, 0.5, 0).tolist() == [[1.0, 0.0, 0.0]]


def test_log_normal_is_as_the_paper_measured_clouds() -> None:
    drawn = LogNormal(0.024).draw(1000, 100, 0.4, seed=0)
    assert np.median(drawn) == pytest.approx(0.024, rel=0.02)
    assert drawn.mean() == pytest.approx(0.454 - 0.399, rel=0.05)
    assert drawn.std() == pytest.approx(0.116, rel=0.2)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "steps.csv"
    path.write_text("\n".join(["step,rank,seconds", *lines]))
    return path


def test_recorded_steps_come_in_order_or_as_they_are_drawn(tmp_path: Path) -> None:
    path = written(tmp_path, "7,1,3", "7,0,1", "9,0,2", "9,1,1", "9,1,4")  # two stages of rank 1 in step 9
    assert RecordedSteps.load(path) == parse_delays(f"steps:{path}") == RecordedSteps(((1.0, 3.0), (2.0, 4.0)))
    drawn = RecordedSteps.load(path).draw(3, 2, 0.5, seed=0)
    assert drawn.tolist() == [[0.0, 1.0], [0.5, 1.5], [0.0, 1.0]]
    resampled = parse_delays(f"resampled:{path}")
    rows = resampled.draw(100, 2, 0.5, seed=0).tolist()
    assert {tuple(row) for row in rows} == {(0.0, 1.0), (0.5, 1.5)}
    assert rows == resampled.draw(100, 2, 0.5, seed=0).tolist() != resampled.draw(100, 2, 0.5, seed=1).tolist()
    for wrong in ((), ((),), ((1.0,), (1.0, 2.0)), ((0.0,),)):
        with pytest.raises(ValueError, match="one tuple or more"):
            RecordedSteps(wrong)
    with pytest.raises(ValueError, match="recorded steps are of 2 ranks, so 3 cannot be simulated"):
        simulate(one_message(0.1), "full", 3, cluster=FREE, iterations=2, delays=resampled)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ((), "a line for every rank"),
        (("0,0,1", "1,1,1"), "a line for every rank"),
        (("0,0,0",), "above 0"),
        (("0,0,nan",), "above 0"),
        (("0,0",), "the columns step, rank and seconds"),
        (("0,x,1",), "the columns step, rank and seconds"),
    ],
)
def test_files_without_steps_are_refused(tmp_path: Path, lines: tuple[str, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_delays(f"steps:{written(tmp_path, *lines)}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        ("random:2:0.3", RandomRanks(2, 0.3)),
        ("rotating:0:0.1", Rotating((0.0, 0.1))),
        ("slow:3", OneSlow(3.0)),
        ("log-normal:0.02", LogNormal(0.02)),
        ("Log-Normal:0.02:0.5", LogNormal(0.02, 0.5)),
    ],
)
def test_delays_as_text(text: str, expected: Any) -> None:
    assert parse_delays(text) == expected


@pytest.mark.parametrize("text", ["", "random", "random:1.5:1", "rotating", "slow:x", "slow:1:2", "log-normal"])
def test_wrong_texts(text: str) -> None:
    with pytest.raises(ValueError, match="unknown delays"):
        parse_delays(text)


# --- Traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_adds_up() -> None:
    trace = Trace("t", 1.0, (Gradient("b", 10, 2.0), Gradient("a", 20, 3.0)))
    assert (trace.ready, trace.backward, trace.compute, trace.nbytes) == ([3.0, 6.0], 5.0, 6.0, 30)
    assert trace.scaled(10.0).ready == [6.0, 12.0]


def test_a_saved_trace_or_plan_is_a_trace(tmp_path: Path) -> None:
    trace = Trace.even(3, 100, 0.25, 0.5)
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    plan = merging.plan("exact", ["b", "a"], [10, 20], [0.5, 2.0], MessageCost(1.0, 1.0), around=4.0)
    plan.save(tmp_path / "plan.json")
    trace = Trace.load(tmp_path / "plan.json")
    assert trace == Trace("recorded", 4.0, (Gradient("b", 10, 0.0), Gradient("a", 20, 1.5)))


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="holds no trace"):
        Trace.load(tmp_path / "no.json")
    plan = merging.plan("single", ["b", "a"], [10, 20], [0.5, 0.0], MessageCost(1.0, 1.0), breaks=[1])
    with pytest.raises(ValueError, match="several dtypes"):
        Trace.recorded(plan)


@pytest.mark.parametrize(("name", "tensors", "megabytes"), [("resnet50", 161, 102.2), ("googlenet", 69, 53.5)])
def test_the_traces_of_this_repository(name: str, tensors: int, megabytes: float) -> None:
    trace = Trace.load(TRACES / f"{name}.json")
    assert len(trace.gradients) == tensors
    assert trace.nbytes / 1e6 == pytest.approx(megabytes, abs=0.1)
    assert trace.scaled(0.4).backward == pytest.approx(0.4)


# --- Known figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "speedup"), [(0.2, 1.41), (0.3, 1.60), (0.4, 1.78)])
def test_solo_over_full_with_one_of_eight_ranks_delayed(delay: float, speedup: float) -> None:
    options: dict[str, Any] = {"iterations": 400, "delays": RandomRanks(1, delay), "cycle": 0.0}
    results = [simulate(one_message(0.4), policy, 8, cluster=FREE, **options) for policy in ("full", "solo")]
    full, solo = (result.iteration_time for result in results)
    assert full == pytest.approx(0.4 + delay)
    assert full / solo == pytest.approx(speedup, rel=0.01)


def at_scale(rule: str, ranks: int) -> float:
    return simulate(resnet50(), "full", ranks, cluster=PAPER, rule=rule, iterations=1, cycle=0.0).iteration_time


def test_a_message_for_each_gradient_and_one_message_cross() -> None:
    assert at_scale("wait_free", 32) < at_scale("single", 32)
    assert at_scale("wait_free", 64) > at_scale("single", 64)


def test_merging_gains_over_both_at_64_ranks() -> None:
    """The paper has 1.75 and 1.45, on its own trace."""
    exact = at_scale("exact", 64)
    assert 1.5 < at_scale("wait_free", 64) / exact < 2.0
    assert 1.2 < at_scale("single", 64) / exact < 1.6


@pytest.mark.parametrize("rule", merging.RULES)
def test_without_delays_an_iteration_takes_what_the_plan_predicts(rule: str) -> None:
    trace, cost = resnet50(), PAPER.cost("ring", 16)
    plan = trace.plan(rule, cost)
    result = simulate(trace, "full", 16, cluster=PAPER, rule=rule, iterations=2, cycle=0.0)
    assert result.iteration_time == pytest.approx(plan.duration(cost), abs=1e-6)
    assert result.messages == len(plan.messages)


def test_groups_cost_what_their_size_costs() -> None:
    cluster = Cluster(0.05, 0.0)
    result = simulate(one_message(1.0), "group_average:2", 8, cluster=cluster, iterations=9, cycle=0.0)
    # The first of the rounds is of all 8, the others are of pairs.
    assert result.ends[-1].tolist() == pytest.approx([9 * 1.0 + 14 * 0.05 + 8 * 2 * 0.05] * 8)


def test_weighted_averages_wait_once_in_a_period() -> None:
    options: dict[str, Any] = {"iterations": 8, "delays": OneSlow(2.0), "cycle": 0.0}
    result = simulate(one_message(1.0), "weighted_average:4,0.9", 2, cluster=FREE, **options)
    assert sum(result.closed_by.values()) < 4
    assert result.ends[-1].max() == pytest.approx(16.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_ranks_on_time_without_delays(policy: str) -> None:
    result = simulate(one_message(0.1), policy, 6, cluster=FREE, iterations=20)
    assert result.late == 0.0
    assert result.staleness == 0.0
    assert result.contributors == 6.0
    assert result.efficiency == pytest.approx(1.0, abs=0.011)  # a cycle's rhythm


def test_contributors_and_staleness() -> None:
    delays = OneSlow(2.0)
    full, solo = (
        simulate(one_message(0.1), policy, 4, cluster=Cluster(1e-4, 0.0), iterations=200, delays=delays)
        for policy in ("full", "solo")
    )
    assert full.contributors == 4.0
    assert (full.late, full.staleness) == (0.0, 0.0)
    # While the others train, the slow rank comes for every second round, and too late.
    assert 2.0 < solo.contributors < 4.0
    assert max(solo.staleness_histogram) >= 1
    assert 0.0 < solo.late < 1.0
    assert solo.efficiency > full.efficiency


def test_the_last_ranks_do_not_wait_for_each_other() -> None:
    delays = LogNormal(0.024, 1.3)
    result = simulate(resnet50(), "majority", 64, cluster=PAPER, rule="wait_free", iterations=100, delays=delays)
    # Six ranks are left, of which each was late for some of the messages: rounds of the last step only.
    assert 0 < result.closed_by["liveness"] <= 161
    assert (result.ends[-1] > result.ends[-2]).all()


@pytest.mark.parametrize("policy", [*POLICIES, "weighted_average:8,0.9"])
def test_a_seed_gives_the_same_job(policy: str) -> None:
    def run(seed: int) -> Result:
        return simulate(one_message(0.1), policy, 5, cluster=PAPER, iterations=30, delays=LogNormal(0.05), seed=seed)

    assert run(1) == run(1)
    assert (run(1).ends == run(1).ends).all()
    assert run(1).iteration_time != run(2).iteration_time


def test_delays_of_your_own() -> None:
    delays = np.array([[0.0, 1.0], [2.0, 0.0]])
    result = simulate(one_message(1.0), "full", 2, cluster=FREE, iterations=2, delays=delays, cycle=0.0)
    assert result.ends.tolist() == [[2.0, 2.0], [5.0, 5.0]]


# --- Work sharing -----------------------------------------------------------------------------------------------------


def accumulating(policy: str, delays: Any, passes: int = 4, **options: Any) -> Result:
    """8 ranks, steps of 0.4 s."""
    arguments = {"cluster": FREE, "iterations": 40, "delays": delays, **options}
    return simulate(one_message(0.4), policy, 8, passes=passes, **arguments)


def over_full(result: Result, delays: Any, **options: Any) -> tuple[float, float]:
    full = accumulating("full", delays, **options).iteration_time
    assert result.bound is not None
    return full / result.iteration_time, full / result.bound


def test_a_split_step_takes_as_long_and_ends_with_the_same_backward() -> None:
    trace = Trace("t", 1.0, (Gradient("b", 10, 2.0), Gradient("a", 20, 3.0)))
    assert trace.split(1) == trace
    split = trace.split(4, 0.5)
    assert split.ready == pytest.approx([6.0 + 4 * 0.5 - 0.75, 6.0 + 4 * 0.5])
    assert split.nbytes == trace.nbytes


def test_full_waits_for_the_slowest_rank_however_the_step_is_split() -> None:
    delays = RandomRanks(1, 0.2)
    assert accumulating("full", delays, cycle=0.0).iteration_time == pytest.approx(0.6)
    assert accumulating("full", delays, cycle=0.0, split=0.01).iteration_time == pytest.approx(0.64)


@pytest.mark.parametrize(
    ("passes", "delays", "delays_in", "gain"),
    [
        # 32 micro-batches of 0.1 s. Seven ranks make four each in 0.4 s; five each in 0.5 s, and the late one none.
        (4, RandomRanks(1, 0.4), "first", 0.8 / 0.5),
        # Seven ranks make four, and the slow one its second, in 0.6 s; the others have time for six.
        (4, OneSlow(3.0), "each", 1.2 / 0.5),
        (8, OneSlow(3.0), "each", 1.2 / 0.45),
        (4, None, "each", 1.0),
    ],
)
def test_work_sharing_comes_up_to_the_best_schedule(passes: int, delays: Any, delays_in: str, gain: float) -> None:
    result = accumulating("work_sharing", delays, passes, delays_in=delays_in)
    reached, best = over_full(result, delays, passes=passes)
    assert best == pytest.approx(gain, rel=0.01)
    assert reached > 0.97 * best
    assert result.late == result.staleness == 0.0


def test_without_micro_batches_work_sharing_is_full() -> None:
    delays = LogNormal(0.1)
    shared, full = (accumulating(policy, delays, passes=1) for policy in ("work_sharing", "full"))
    assert shared.iteration_time == pytest.approx(full.iteration_time, rel=0.01)


def test_delays_of_micro_batches_travel_with_them() -> None:
    """Rank 0 has three that take four times as long: others take them over, and each takes as long there."""
    delays = np.zeros((20, 8, 4))
    delays[:, 0, 1:] = 0.3
    result = accumulating("work_sharing", delays, iterations=20)
    assert result.bound == pytest.approx(0.6)  # 4.1 s among 8 ranks, in units of 0.1 s
    full = accumulating("full", delays, iterations=20).iteration_time
    assert result.bound < result.iteration_time < full == pytest.approx(1.3, abs=0.01)


def test_messages_of_shared_work_hide_behind_the_last_micro_batch() -> None:
    """In 0.2 s: 0.05 s forward, and four gradients in 0.15 s. A message takes 0.06 s."""
    trace = Trace.even(4, 1_000_000, 0.1, 0.3)
    for rule, seconds in (("wait_free", 0.2 + 0.05 + 0.0375 + 4 * 0.06), ("single", 0.4 + 4 * 0.06)):
        options: dict[str, Any] = {"rule": rule, "iterations": 5, "cycle": 0.0, "passes": 2}
        result = simulate(trace, "work_sharing", 4, cluster=Cluster(0.0, 4e-8), **options)
        assert (result.iteration_time, result.bound) == (pytest.approx(seconds), pytest.approx(seconds))


def test_splitting_costs_each_micro_batch() -> None:
    result = accumulating("work_sharing", None, split=0.01)
    assert result.bound == pytest.approx(0.44)
    assert result.iteration_time == pytest.approx(0.44, rel=0.01)
    assert result.efficiency == pytest.approx(0.4 / 0.44, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks must be 1 or more"),
        ({"iterations": 0}, "iterations must be 1 or more"),
        ({"cycle": -1.0}, "cycle must"),
        ({"passes": 0}, "passes must be 1 or more"),
        ({"split": -1.0}, "split must be 0 or more"),
        ({"delays_in": "last"}, "delays_in must be"),
        ({"algorithm": "star"}, "algorithm must be"),
        ({"rule": "best"}, "rule must be"),
        ({"policy": "most"}, "unknown sync policy"),
        ({"delays": np.zeros((1, 1))}, "must have the shape"),
        ({"delays": np.full((100, 2), -1.0)}, "0 or more seconds"),
        ({"trace": one_message(0.0)}, "must compute for more than 0 seconds, not 0.0"),
        ({"trace": one_message(0.0), "policy": "work_sharing"}, "must compute for more than 0 seconds"),
        ({"trace": one_message(math.nan)}, "must compute for more than 0 seconds, not nan"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"trace": one_message(1.0), "policy": "full", "ranks": 2, "cluster": FREE, **arguments}
    with pytest.raises(ValueError, match=message):
        simulate(**values)


# --- Command line -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", *arguments])


def test_the_command_compares_policies_and_rules(tmp_path: Path) -> None:
    Trace.even(4, 1_000_000, 0.01, 0.02).save(tmp_path / "trace.json")
    options = "--sync full --sync solo --sync group_average:2 --rules exact,single --ranks 4,2 --delay random:1:0.05"
    result = run(
        str(tmp_path / "trace.json"), *options.split(), "--iterations", "5", "--output", str(tmp_path / "plots")
    )
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if "group_average:2" in line or "solo" in line]
    assert len(rows) == 2 * (1 + 2)
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"scaling.png", "gantt.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sync", "most"], "unknown sync policy"),
        (["--rules", "best"], "rule must be"),
        (["--ranks", "two"], "two"),
        (["--delay", "often"], "unknown delays"),
        (["--algorithm", "star"], "algorithm must be"),
        (["--delay-in", "last"], "delays_in must be"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, options: list[str], message: str) -> None:
    Trace.even(1, 4, 0.0, 0.1).save(tmp_path / "trace.json")
    result = run(str(tmp_path / "trace.json"), *options)
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_compares_shared_work(tmp_path: Path) -> None:
    Trace.even(1, 4, 0.0, 0.4).save(tmp_path / "trace.json")
    options = "--sync full --sync work_sharing --passes 4 --split-ms 10 --rules single --ranks 8 --delay-in first"
    result = run(str(tmp_path / "trace.json"), *options.split(), "--delay", "random:1:0.4")
    assert result.exit_code == 0, result.output
    full, shared = (line.split("│") for line in result.output.splitlines() if "single" in line)
    assert (float(full[5]), full[6].strip()) == (pytest.approx(840, abs=1), "-")
    assert (float(shared[5]), float(shared[6])) == (pytest.approx(550, abs=5), pytest.approx(550, abs=1))


def test_the_command_names_a_file_that_is_no_trace(tmp_path: Path) -> None:
    assert run(str(tmp_path / "none.json")).exit_code == 2
    (tmp_path / "list.json").write_text("[]")
    assert "holds no trace" in run(str(tmp_path / "list.json")).output


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod_partial.insight.plots", None)
    monkeypatch.delattr(horovod_partial, "plots", raising=False)
    result = run("trace.json", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.output
