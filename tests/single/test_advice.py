"""What a recording advises: rates that are predicted, and the policy that is chosen."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import synthetic_recordings as synthetic
from numpy.typing import NDArray
from synthetic_recordings import Host, Job
from typer.testing import CliRunner

from horovod_partial import cli, policies
from horovod_partial.insight import advice, recording
from horovod_partial.insight.advice import Advice, predictions

RANKS = 8
STEP = 0.1  # seconds


def advise(folder: Path, compute: NDArray[np.float64], quorum: int | None = None, reduce: float = 0.004) -> Advice:
    synthetic.write(folder, Job(compute, quorum, reduce=reduce))
    return advice.advise(recording.load(folder))


def rates(found: Advice) -> dict[str, float]:
    return {str(one): one.rate for one in found.predictions}


def one_random(steps: int = 100) -> NDArray[np.float64]:
    slow = np.random.default_rng(0).random((steps, RANKS)).argsort(axis=1) == 0
    return synthetic.even(steps, RANKS, STEP) * np.where(slow, 3.0, 1.0)


def test_where_nobody_is_slow_full_stays(tmp_path: Path) -> None:
    found = advise(tmp_path, synthetic.even(100, RANKS, STEP))
    assert found.chosen.policy == "full"
    assert found.text.startswith("Full() is the policy to have")
    assert found.shares == {}
    assert "WorkSharing" not in found.text


def test_rates_are_those_of_the_compute_times(tmp_path: Path) -> None:
    reduce = 0.02
    found = advise(tmp_path, one_random(), reduce=reduce)
    # Some rank takes three times as long in each step, and each rank does in one of eight.
    assert rates(found)["full"] == pytest.approx(1 / (3 * STEP + reduce), rel=0.05)
    assert rates(found)["solo"] == pytest.approx(1 / (STEP * 10 / 8 + reduce), rel=0.1)


def test_of_what_is_near_the_fastest_the_one_with_the_fewest_late_gradients_is_chosen(tmp_path: Path) -> None:
    found = advise(tmp_path, one_random())
    of_gradients = [one for one in found.predictions if str(one) in advice.gradient_policies(RANKS)]
    best = min(one.seconds for one in of_gradients)
    near = [one for one in of_gradients if 0.97 * one.seconds <= best]
    assert found.unsplit == min(near, key=lambda one: one.late)
    assert found.unsplit.policy != "full"
    assert f"If a step cannot be split, this holds: HOROVOD_PARTIAL_SYNC={found.unsplit.policy}" in found.text
    full = found.predictions[0].seconds / found.unsplit.seconds
    told = re.search(
        r"is the policy to have: the program is predicted to be (\S+) times .* (\d+)% of the gradients", found.text
    )
    assert told is not None
    assert [float(number) for number in told.groups()] == pytest.approx([full, 100 * found.unsplit.late], abs=0.5)
    assert float(told[1]) == pytest.approx(full, abs=0.01)
    assert "a Transformer with Adam or Muon did not: if the job has one of these, pass --optimizer" in found.text
    assert "BalancedBatchSampler" not in found.text


def test_the_optimizer_says_which_quorums_are_left(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path, Job(one_random()))
    found = {kind: advice.advise(recording.load(folder), kind) for kind in advice.LEAST_QUORUM}
    quorums = advice.gradient_policies(RANKS)
    assert quorums[found["sgd"].unsplit.policy] < 0.75 * RANKS
    assert "left out" not in found["sgd"].text
    assert "Adam" not in found["sgd"].text
    for kind in ("adam", "adamw", "muon"):
        assert 0.75 * RANKS <= quorums[found[kind].unsplit.policy] < RANKS
        assert (
            f"Quorums below 75% of the ranks are left out: in our benchmarks a Transformer with such an optimizer ({kind})"
            in (found[kind].text)
        )
        assert found[kind].predictions == found["sgd"].predictions


def test_with_adam_full_stays_where_only_small_quorums_gain(tmp_path: Path) -> None:
    compute = synthetic.even(100, RANKS, STEP)
    compute[:, : RANKS // 2] *= 3
    found = advice.advise(recording.load(synthetic.write(tmp_path, Job(compute))), "adam")
    assert found.unsplit.policy == "full"
    assert "no quorum of 75% of the ranks or more is predicted to be more than 3 % faster" in found.text


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_smaller_batches_are_compared_with_all_policies(tmp_path: Path, optimizer: str | None) -> None:
    compute = STEP * np.random.default_rng(0).lognormal(0.0, 0.2, (100, RANKS))
    compute[:, : RANKS // 2] *= 1.8
    found = advice.advise(recording.load(synthetic.write(tmp_path, Job(compute))), optimizer)
    assert "under Full()" in found.text
    assert "which no policy of gradients betters" not in found.text  # Solo is faster


def test_samples_of_all_lengths_are_balanced_first(tmp_path: Path) -> None:
    compute = STEP * np.random.default_rng(0).lognormal(0.0, 0.4, (200, RANKS))
    found = advise(tmp_path, compute, reduce=0.004)
    told = re.search(r"hvd.BalancedBatchSampler: the program is predicted to be ([0-9.]+) times as fast", found.text)
    assert told is not None
    full = (compute.max(axis=1) + 0.004).mean()
    assert float(told[1]) == pytest.approx(full / (compute.mean() + 0.004), rel=0.05)
    assert "nothing is stale. Otherwise this holds: " in found.text
    assert "HOROVOD_PARTIAL_SYNC=" in found.text


@pytest.mark.parametrize("quorum", [None, 4])
def test_a_rank_that_is_always_slow_gets_less_to_do(tmp_path: Path, quorum: int | None) -> None:
    compute = synthetic.even(100, RANKS, STEP)
    compute[:, 3] *= 1.6
    found = advise(tmp_path, compute, quorum)
    assert found.shares[3] / found.shares[0] == pytest.approx(1 / 1.6, rel=0.02)
    assert sum(found.shares.values()) == pytest.approx(RANKS)
    assert "Rank 3 always takes 1.60 times as long as the median rank: give it 0.65 of its batch" in found.text
    assert "and each other rank 1.05 of its own: the program is predicted to be" in found.text


def test_who_evaluates_alone_is_told_what_to_do(tmp_path: Path) -> None:
    compute = synthetic.even(400, RANKS, STEP)
    compute[49::50, 0] += 5.0
    text = advise(tmp_path, compute).text
    assert re.match(
        r"Rank 0 pauses for 5\.\d s every 50 steps: the others wait for it for \d+ % of the time, since step 4\d. If an",
        text,
    )
    assert (
        "divide it among all ranks; if it is a checkpoint, save it in the background. Where the pauses must stay"
        in text
    )
    assert "HOROVOD_PARTIAL_SYNC=" in text


def test_shares_are_told_beside_a_policy_that_betters_them(tmp_path: Path) -> None:
    compute = one_random()
    compute[:, 3] *= 2
    text = advise(tmp_path, compute).text
    assert "Rank 3 always takes" in text
    assert "which no policy of gradients betters" not in text
    assert "Where batches must stay as they are, this holds: If a step can be split into micro-batches" in text
    assert "If a step cannot be split, this holds: HOROVOD_PARTIAL_SYNC=" in text


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("quorum", [None, 4])
def test_a_metric_in_each_step_is_told(tmp_path: Path, quorum: int | None, every: int) -> None:
    """There all ranks meet, so no policy can help."""
    folder = synthetic.write(tmp_path, Job(one_random(), quorum))
    for file in folder.iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        ends = sorted(end for line in lines if line.get("table") == "reductions" for end in line["end"])
        begin = [end + 500 for end in ends[::every]]
        waits = {"table": "waits", "begin": begin, "end": [time + 400 for time in begin]}
        file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, waits]))
    assert ("waits for an operation of Horovod's own" in advice.advise(recording.load(tmp_path)).text) == (every == 1)


def test_work_sharing_is_advised_with_its_price(tmp_path: Path) -> None:
    compute = synthetic.even(100, RANKS, STEP, noise=0.0)
    compute[:, 3] *= 2
    found = advise(tmp_path, compute)
    assert (found.chosen.policy, found.chosen.late) == ("work_sharing", 0)
    # The others make all but a part of what the slow rank would have made.
    assert found.chosen.rate == pytest.approx(1 / (STEP * RANKS / (RANKS - 0.5) + 0.004), rel=0.07)
    told = re.search(r"backward_passes_per_step=(\d+), .* If a micro-batch takes ([0-9.]+) ms more", found.text)
    assert told is not None
    assert int(told[1]) == found.chosen.passes
    # So much longer micro-batches fill the time that Full() waits.
    gap = 1 / rates(found)["full"] - 1 / found.chosen.rate
    assert float(told[2]) == pytest.approx(1e3 * gap / found.chosen.passes, rel=0.2)


def test_samples_stay_long_on_whatever_rank(tmp_path: Path) -> None:
    """So sharing gains less than where the ranks are slow."""
    compute = STEP * np.random.default_rng(0).lognormal(0.0, 0.4, (100, RANKS))
    of_ranks, of_samples = (
        advice.predict(compute, 0.004, ["work_sharing"], passes=4, of_samples=of_samples)[0]
        for of_samples in (False, True)
    )
    full = advice.predict(compute, 0.004, ["full"])[0]
    assert full.rate < of_samples.rate < of_ranks.rate


@pytest.mark.parametrize("passes", [2, 8])
def test_what_is_recorded_under_work_sharing_tells_the_same(tmp_path: Path, passes: int) -> None:
    compute = one_random()
    under_full = advise(tmp_path / "full", compute)
    synthetic.write(tmp_path / "shared", Job(compute, passes=passes))
    shared = advice.advise(recording.load(tmp_path / "shared"))
    for one, other in zip(under_full.predictions, shared.predictions, strict=True):
        assert one.rate == pytest.approx(other.rate, rel=0.05), str(one)
    assert "recorded under WorkSharing(), backward_passes_per_step" in shared.title


def test_the_text_names_what_is_chosen(tmp_path: Path) -> None:
    """Work sharing is not chosen if it hardly betters Full()."""
    for seed in range(6):
        compute = STEP * np.random.default_rng(seed).lognormal(0.0, 0.05, (60, 2))
        found = advise(tmp_path / str(seed), compute)
        chosen = found.chosen.policy
        assert ("Full()" if chosen == "full" else chosen.replace("work_sharing", "WorkSharing()")) in found.text


def test_a_split_costs_what_it_is_said_to_cost(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path, Job(one_random(), passes=8))
    done = {}
    for split in (0, 2):
        done[split] = advice.advise(recording.load(folder), split=split / 1e3)
    dear, cheap = (rates(done[split]) for split in (2, 0))
    assert dear["work_sharing, K = 8"] == pytest.approx(cheap["work_sharing, K = 8"], rel=0.02)  # as recorded
    assert dear["full"] > 1.03 * cheap["full"]  # it would not be split
    assert dear["work_sharing, K = 16"] < cheap["work_sharing, K = 16"]
    refused = CliRunner().invoke(cli.app, ["advise", str(tmp_path), "--split-ms", "50"])
    assert refused.exit_code == 2
    assert "a micro-batch cannot take 50.0 ms more than its part of a step" in " ".join(refused.output.split())


def test_averages_every_few_steps_tell_nothing_of_a_step(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path, Job(one_random(), 4))
    for file in folder.iterdir():
        file.write_text(file.read_text().replace('"quorum:4"', '"WeightedAverage(period=8)"'))
    told = r"recorded under WeightedAverage\(period=8\), whose ranks meet every few steps"
    with pytest.raises(ValueError, match=told):
        advice.advise(recording.load(tmp_path))


def test_intervals_hold_the_time_and_grow_with_the_spread() -> None:
    policies = ["full", "solo"]
    steady = advice.predict(synthetic.even(200, RANKS, STEP, noise=0.01), 0.004, policies)
    heavy = np.where(np.random.default_rng(1).random((200, RANKS)) < 0.05, 11.0, 1.0) * STEP
    spread = advice.predict(heavy, 0.004, policies)
    for one in (*steady, *spread):
        assert one.interval[0] <= one.seconds <= one.interval[1]
    widths = [(one.interval[1] - one.interval[0]) / one.seconds for one in (steady[0], spread[0])]
    assert widths[0] < 0.02 < widths[1]
    longest = heavy.max(axis=1)  # under Full() a step takes as long as its slowest rank
    expected = 2 * 1.96 * longest.std() / np.sqrt(len(longest)) / longest.mean()
    assert widths[1] == pytest.approx(expected, rel=0.4)


def test_staleness_is_told(tmp_path: Path) -> None:
    compute = synthetic.even(100, RANKS, STEP)
    compute[:, 0] *= 4  # so that it is there for a quarter of its steps when the others have taken all of theirs
    by_policy = {str(one): one for one in advise(tmp_path, compute).predictions}
    assert (by_policy["full"].late, by_policy["full"].staleness, by_policy["full"].staleness_95) == (0, 0, 0)
    assert by_policy["majority"].late == pytest.approx(1 / RANKS / 4, abs=0.02)
    assert by_policy["majority"].staleness == pytest.approx(3 / RANKS / 4, abs=0.06)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 64, 1000])
def test_policies_fit_the_ranks_and_are_in_order(ranks: int) -> None:
    of_gradients = advice.gradient_policies(ranks)
    names, quorums = list(of_gradients), list(of_gradients.values())
    assert names[0] == "full"
    assert quorums[1:] == [policies.parse(name).to_core(ranks).quorum for name in names[1:]]
    assert quorums == sorted(set(quorums), reverse=True)
    assert quorums[-1] == 1
    for name in predictions.model_policies(ranks):
        policies.parse(name).to_core(ranks)


def test_many_ranks_are_not_resampled_for_ever() -> None:
    compute = synthetic.even(40, 600, STEP)
    for one in advice.predict(compute, 0.004, advice.gradient_policies(600)):
        assert one.rate > 0


def test_the_command(tmp_path: Path) -> None:
    synthetic.write(tmp_path, Job(one_random()))
    done = CliRunner().invoke(cli.app, ["advise", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for policy in ("full", "majority", "solo", "group_average", "partial_reduce:4", "weighted_average:8,0.999"):
        assert policy in done.output
    assert "HOROVOD_PARTIAL_SYNC=" in done.output
    adam = CliRunner().invoke(cli.app, ["advise", str(tmp_path), "--optimizer", "adam"])
    assert "Quorums below 75% of the ranks are left out" in " ".join(adam.output.split())
    refused = CliRunner().invoke(cli.app, ["advise", str(tmp_path), "--optimizer", "sdg"])
    assert refused.exit_code == 2
    assert "--optimizer must be one of sgd, adam, adamw, muon, not 'sdg'" in " ".join(refused.output.split())


@pytest.mark.parametrize(("steps", "ranks"), [(10, 4), (60, 1)])
def test_too_little_is_refused(tmp_path: Path, steps: int, ranks: int) -> None:
    synthetic.write(tmp_path, Job(synthetic.even(steps, ranks)))
    done = CliRunner().invoke(cli.app, ["advise", str(tmp_path)])
    assert done.exit_code == 2
    assert "advice takes 30 steps or more of all ranks, and 2 ranks or more" in done.output


def test_what_machines_have_recorded_that_were_all_loaded_is_refused(tmp_path: Path) -> None:
    synthetic.write(tmp_path, Job(one_random(), hosts=[Host("worker-0", starved=0.8), Host("worker-1", starved=0.9)]))
    told = "Each rank waited for a processor for 80% of the time in its steps or more, so compute times are uncertain:"
    refused = CliRunner().invoke(cli.app, ["advise", str(tmp_path)])
    assert refused.exit_code == 2
    assert f"too loaded to predict from. {told}" in " ".join(refused.output.split())
    done = CliRunner().invoke(cli.app, ["advise", str(tmp_path), "--anyway"])
    assert done.exit_code == 0, done.output
    assert told in done.output
    assert "Until then this holds: If a step can be split" in done.output


def test_a_rank_that_is_starved_where_others_are_not_is_the_finding(tmp_path: Path) -> None:
    hosts = [Host("worker-0"), Host("worker-0"), Host("worker-1", starved=0.8), Host("worker-1", starved=0.03)]
    compute = synthetic.even(100, 4, STEP)
    compute[:, 2] *= 5.4
    found = advice.advise(recording.load(synthetic.write(tmp_path, Job(compute, hosts=hosts))))
    assert found.text.startswith(
        "Rank 2 is starved: it waits for a processor for 80% of the time in its steps, and no other rank for more than 10%."
    )
    assert re.search(
        r"or end other programs there\. Until then this holds: Rank 2 always takes 5\.\d+ times as long", found.text
    )
    assert "uncertain" not in found.text


@pytest.mark.parametrize("waits", [True, False])
def test_a_slow_loader_is_told_before_any_policy(tmp_path: Path, waits: bool) -> None:
    compute = synthetic.even(100, RANKS, STEP)
    loader = 0.1 * compute
    compute[:, 3] *= 2
    loader[:, 3] = (0.6 if waits else 0.1) * compute[:, 3]
    found = advice.advise(recording.load(synthetic.write(tmp_path, Job(compute, loader=loader))))
    first = "On rank 3 the program waits for data: first give each loader more workers, or faster storage."
    assert found.text.startswith(first) == waits
    assert "HOROVOD_PARTIAL_SYNC=" in found.text


# --- The program as it is ---------------------------------------------------------------------------------------------


def two_slow() -> NDArray[np.float64]:
    compute = synthetic.even(200, 4, STEP)
    compute[:, 2:] *= 2
    return compute


def test_slow_ranks_have_steps_left_when_fast_ones_have_ended(tmp_path: Path) -> None:
    found = advise(tmp_path, two_slow())
    by_policy = {str(one): one for one in found.predictions}
    full = by_policy["full"]
    assert full.seconds == pytest.approx(1 / full.rate)
    for policy in ("majority", "solo"):
        assert full.seconds / by_policy[policy].seconds == pytest.approx(1.0, abs=0.06)
        assert by_policy[policy].rate / full.rate == pytest.approx(1.5, abs=0.1)
    assert full.seconds / by_policy["full, batches by speed"].seconds == pytest.approx(1.5, abs=0.06)
    assert found.unsplit.policy == "full"
    told = re.search(
        r"counts rounds in place of [^.]*HOROVOD_PARTIAL_SYNC=(\w+) makes it ([0-9.]+) times as", found.text
    )
    assert told is not None
    assert float(told[2]) == pytest.approx(by_policy[told[1]].rate / full.rate, abs=0.01)
    assert "pass --optimizer" in found.text  # because gradients would be late then


def test_where_ranks_take_turns_at_being_slow_nothing_must_change(tmp_path: Path) -> None:
    assert "counts rounds" not in advise(tmp_path, one_random(200)).text


def test_a_program_that_counts_rounds_is_told_by_its_end(tmp_path: Path) -> None:
    compute = two_slow()
    for name, fixed in (("slow", compute[:60]), ("alike", synthetic.even(60, 4, STEP))):
        assert "The program counts rounds" not in advise(tmp_path / name, fixed, quorum=2).text
    synthetic.write(tmp_path / "rounds", Job(compute, 2, until=9.0))
    found = advice.advise(recording.load(tmp_path / "rounds"))
    assert "The program counts rounds" in found.text
    for one in found.predictions:
        assert one.seconds == pytest.approx(1 / one.rate)
    assert found.unsplit.policy != "full"
    assert "If the program counts rounds" not in found.text
    synthetic.write(tmp_path / "killed", Job(compute, 2, until=9.0, ended=False))
    assert "counts rounds:" not in advice.advise(recording.load(tmp_path / "killed")).text


def test_ranks_meet_where_they_wait_for_something_else() -> None:
    compute = one_random(200)
    never, always, seldom = (
        {one.policy: one for one in advice.predict(compute, 0.004, ["full", "solo"], meets=meets)}
        for meets in (None, np.ones(200, bool), np.arange(200) % 10 == 9)
    )
    assert always["solo"].seconds == pytest.approx(never["full"].seconds, rel=0.02)
    assert 1.1 * never["solo"].seconds < seldom["solo"].seconds < 0.9 * always["solo"].seconds
    assert seldom["full"].seconds == pytest.approx(never["full"].seconds, rel=0.02)
    assert seldom["solo"].interval[0] <= seldom["solo"].seconds <= seldom["solo"].interval[1]
