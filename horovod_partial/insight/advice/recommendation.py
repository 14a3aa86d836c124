"""Chooses a policy from the predictions, and explains the choice in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.advice.predictions import (
    PASSES,
    Prediction,
    gradient_policies,
    model_policies,
    predict,
    price_of_a_split,
    seconds_behind_the_last,
)
from horovod_partial.insight.recording import Clocks, JobSteps, Recording
from horovod_partial.insight.recording.steps import other_waits
from horovod_partial.insight.report import slowness
from horovod_partial.insight.report.slowness import Slowness

# A policy counts as equally fast as the fastest one if it is at least this share as fast.
# Among equally fast policies, the advice recommends the policy with the fewest late gradients.
NEAR = 0.97
_MARGIN = f"{100 * (1 - NEAR):.0f} %"
WORTH_A_CHANGE = 0.9  # the advice names a change of the program only if it then takes at most this share of the time
_OFTEN = 0.5  # the advice warns if ranks wait for something besides gradients in at least this share of steps
# For each optimizer, the smallest quorum that the advice recommends, as a share of the ranks.
# With smaller quorums, late gradients have cost models more than speed has gained: see docs/policies.md.
LEAST_QUORUM = {"sgd": 0.0, "adam": 0.75, "adamw": 0.75, "muon": 0.75}


@dataclass(frozen=True)
class Advice:
    """The advice for a recorded job: which policy it should use.

    `title` says what was recorded. `predictions` come in this order: gradient policies from `full` to `solo`, `full`
    with other batches, work sharing, model policies. `chosen` is the prediction for the recommended policy, which never
    averages models.
    `unsplit` is the prediction for the policy to take if a step cannot be split into micro-batches. `shares` has by
    rank a factor for the batch size, with which all ranks take equally long under `full` if batches are equal now;
    empty if no rank is always slow. `text` is the advice, and `remarks` has sentences about missing data.
    """

    title: str
    predictions: tuple[Prediction, ...]
    chosen: Prediction
    unsplit: Prediction
    shares: dict[int, float]
    text: str
    remarks: tuple[str, ...]


def advise(recording: Recording, optimizer: str | None = None, split: float = 0.0, *, anyway: bool = False) -> Advice:
    """Predict from a recording how long the program would take under each policy, and recommend one.

    `optimizer` is the job's optimizer, a key of `LEAST_QUORUM`; None if it is unknown. Under work sharing a micro-batch
    takes `split` seconds longer than its part of the step's compute time.

    Raises ValueError if there are too few steps, ranks are missing, or the ranks averaged models every few steps. (Then
    the compute times of single steps are unknown.) Raises ValueError, too, if `split` is longer than a recorded
    micro-batch, or if hosts were too loaded to trust the compute times. With `anyway`, the text says instead what is
    uncertain on such hosts.
    """
    clocks = Clocks.fit(recording)
    all_steps = JobSteps.of(recording, clocks)
    steps = all_steps.common()
    count, ranks = len(steps.ranks[0].step), len(steps.ranks)
    if count < slowness.LEAST_STEPS or ranks < 2 or ranks < recording.size:
        raise ValueError(
            f"run {recording.run} has {count} steps of {ranks} rank(s) in common, of {recording.size}: advice takes "
            f"{slowness.LEAST_STEPS} steps or more of all ranks, and 2 ranks or more"
        )
    if slowness.too_loaded(recording) and not anyway:
        told = f"was recorded on machines too loaded to predict from. {slowness.of_load(recording, ())}"
        raise ValueError(f"run {recording.run} {told} --anyway advises all the same.")
    if steps.policy.startswith("WeightedAverage"):
        raise ValueError(
            f"run {recording.run} was recorded under {_short(steps.policy)}, whose ranks meet every few steps: record it under Full()"
        )
    compute = np.maximum(steps.compute, 1e-6)
    if steps.passes > 1:
        fastest = float(np.median(compute, axis=0).min()) / steps.passes
        if split >= fastest:
            raise ValueError(
                f"a micro-batch cannot take {1e3 * split:.1f} ms more than its part of a step: in run {recording.run} those of one "
                f"rank take {1e3 * fastest:.1f} ms"
            )
        compute = np.maximum(compute - split * steps.passes, 1e-6)
    reduction = seconds_behind_the_last(steps)
    quorums = gradient_policies(ranks)
    waits = [other_waits(recording.ranks[of.rank], of, clocks, rounds=steps.rounds) for of in steps.ranks]
    meets = np.median(waits, axis=0) > 0
    often = float(meets.mean())
    counts_rounds = _counts_rounds(recording, all_steps)
    to_the_end = partial(predict, compute, reduction, meets=meets if often < _OFTEN else None, rounds=counts_rounds)
    of_gradients, of_models = to_the_end(quorums), to_the_end(model_policies(ranks))
    slow = slowness.of_job([rank.rank for rank in steps.ranks], compute, steps.parts)
    follows_data = slowness.follows_data(compute, slow)
    of_shares = [
        predict(compute, reduction, ["work_sharing"], passes=passes, split=split, of_samples=follows_data)[0]
        for passes in PASSES
    ]
    least = LEAST_QUORUM[optimizer] if optimizer is not None else 0.0
    left = [prediction for prediction in of_gradients if quorums[prediction.policy] >= least * ranks]
    full = of_gradients[0]
    gaining = [one for one in of_shares if one.seconds < NEAR * full.seconds]
    chosen, unsplit = _choice([*left, *gaining]), _choice(left)
    by_rounds = _choice([replace(one, seconds=1 / one.rate) for one in left])
    work_sharing = ""
    if gaining:
        shared = chosen if chosen in gaining else _choice(gaining)
        price = price_of_a_split(compute, reduction, shared, full.seconds, of_samples=follows_data)
        work_sharing = _of_shares(full, shared, price, split)
    shares = _shares(slow)
    times = {"batches by speed": compute * list(shares.values())} if shares else {}
    times |= {"batches by length": _alike(compute)} if follows_data else {}
    balanced = [replace(predict(each, reduction, ["full"])[0], batches=how) for how, each in times.items()]
    load = slowness.of_load(recording, [rank.rank for rank in slow if rank.times])
    rounds = _of_rounds(full, unsplit, by_rounds, counts_rounds)
    sentences = (
        load and f"{load} Until then this holds:",
        slowness.of_few_steps(compute, slow, rounds=steps.rounds),
        _of_parts(slow),
        _of_other_waits(often),
        _of_pauses(slow),
        _of_batches([*of_gradients, *of_shares], balanced, slow, shares),
        _of_data(full, balanced if follows_data else []),
        work_sharing,
        _of_policy(full, unsplit, least),
        rounds,
        _of_optimizer(optimizer, least, by_rounds if rounds else unsplit),
        _of_models(unsplit, of_models),
    )
    return Advice(
        title=f"run {recording.run}: {ranks} ranks, {count} steps, recorded under {_short(steps.policy)}; predicted",
        predictions=(*of_gradients, *balanced, *of_shares, *of_models),
        chosen=chosen,
        unsplit=unsplit,
        shares=shares,
        text=" ".join(filter(None, sentences)),
        remarks=(*recording.remarks, *steps.remarks),
    )


def _choice(predictions: list[Prediction]) -> Prediction:
    """Of the policies that are nearly the fastest, choose the one with the fewest late gradients and micro-batches."""
    best = min(prediction.seconds for prediction in predictions)
    near = [prediction for prediction in predictions if NEAR * prediction.seconds <= best]
    return min(near, key=lambda prediction: (prediction.late, prediction.passes))


def _short(policy: str) -> str:
    """Return the text of a recorded policy without the options of its buckets."""
    return policy.partition(" op=")[0]


def _shares(slow: list[Slowness]) -> dict[int, float]:
    """Return a factor for each rank's batch size, so that ranks that are always slow take as long as the others."""
    if not any(rank.always for rank in slow):
        return {}
    speeds = np.array([1 / rank.factor if rank.always else 1.0 for rank in slow])
    shares: NDArray[np.float64] = speeds * len(slow) / speeds.sum()
    return {rank.rank: float(share) for rank, share in zip(slow, shares, strict=True)}


def _counts_rounds(recording: Recording, steps: JobSteps) -> bool:
    """Return whether the program counts rounds: its ranks ended together, after different numbers of steps."""
    if not steps.rounds or steps.passes or not all(rank.ended for rank in recording.ranks.values()):
        return False
    taken = [rank.step[-1] for rank in steps.ranks]
    ends = [rank.result[-1] for rank in steps.ranks]
    begin = min(rank.begin[0] for rank in steps.ranks)
    return bool(min(taken) < NEAR * max(taken) and min(ends) - begin > NEAR * (max(ends) - begin))


def _alike(compute: NDArray[np.float64]) -> NDArray[np.float64]:
    """Regroup compute times so that they are similar on all ranks in a step, like with `hvd.BalancedBatchSampler`."""
    steps = np.sort(compute, axis=None).reshape(compute.shape)
    return np.random.default_rng(0).permutation(steps)


def _of_parts(slow: list[Slowness]) -> str:
    told = ""
    for part, why, then in (
        ("loader", "the program waits for data", "give each loader more workers, or faster storage"),
        (
            "other",
            "the program does something else between steps",
            "evaluate, save and log alike on all ranks, or asynchronously",
        ),
    ):
        if of := [str(rank.rank) for rank in slow if rank.cause[0] == part and rank.kind != "pauses"]:
            told += f"On rank{'s' if len(of) > 1 else ''} {', '.join(of)} {why}: first {then}. No policy removes that; the rest takes it as it is. "
    return told.strip()


def _of_other_waits(share: float) -> str:
    if share < _OFTEN:
        return ""
    return (
        f"In {share:.0%} of its steps the program waits for an operation of Horovod's own beside its gradients, such as the "
        "average of a metric. There it meets the slowest rank under every policy. So no policy helps until this operation is "
        "done less often, for example every 50 steps. The rest of this advice assumes that."
    )


def _of_pauses(slow: list[Slowness]) -> str:
    pausing = [rank for rank in slow if rank.kind == "pauses"]
    if not pausing:
        return ""
    told = "; ".join(f"rank {rank.rank} {rank}" for rank in pausing)
    return (
        f"{told[0].upper()}{told[1:]}. If an evaluation is the cause, divide it among all ranks; if it is a checkpoint, save it in "
        "the background. Where the pauses must stay, this holds:"
    )


def _of_batches(
    predictions: list[Prediction], balanced: list[Prediction], slow: list[Slowness], shares: dict[int, float]
) -> str:
    full = predictions[0]
    if not shares or balanced[0].seconds > NEAR * full.seconds:
        return ""
    named = [rank for rank in slow if rank.always]
    ranks = "; ".join(
        f"rank {rank.rank} always takes {rank.factor:.2f} times as long as the median rank: give it {shares[rank.rank]:.2f} of "
        "its batch"
        for rank in named
    )
    others = [share for rank, share in shares.items() if rank not in {each.rank for each in named}]
    rest = f", and each other rank {others[0]:.2f} of its own" if others else ""
    fastest = min(prediction.seconds for prediction in predictions)
    is_best = NEAR * balanced[0].seconds <= fastest
    best = f", which no policy of gradients betters by more than {_MARGIN}" if is_best else ""
    return (
        f"{ranks[0].upper()}{ranks[1:]}{rest}: the program is predicted to be {_times(full, balanced[0])}{best}. "
        "Nothing is stale then, and if all batches are equal now, each step has as many samples as before; "
        "weigh each rank's loss by its share. Where batches must stay as they are, this holds:"
    )


def _of_data(full: Prediction, alike: list[Prediction]) -> str:
    if not alike or alike[0].seconds > NEAR * full.seconds:
        return ""
    return (
        "All ranks have long and short steps, and one step does not predict the next. This happens if samples differ in length. "
        "If yours do, first give all ranks samples of like length in the same step, with hvd.BalancedBatchSampler: the "
        f"program is predicted to be {_times(full, alike[0])}, and nothing is stale. Otherwise this holds:"
    )


def _of_shares(full: Prediction, shared: Prediction, price: float, split: float) -> str:
    assumed = (
        f"a micro-batch takes {1e3 * split:.1f} ms more than its part of a step" if split else "a split costs nothing"
    )
    return (
        f"If a step can be split into micro-batches, take hvd.WorkSharing() with backward_passes_per_step={shared.passes}, in PyTorch or "
        f"Keras: the program is predicted to be {_times(full, shared)}, and no gradient is late. "
        f"This assumes that {assumed} (--split-ms). If a micro-batch takes {1e3 * price:.1f} ms more than its part, an unsplit step "
        "under Full() is as fast. If a step cannot be split, this holds:"
    )


def _times(full: Prediction, one: Prediction) -> str:
    return f"{full.seconds / one.seconds:.2f} times as fast as under Full()"


def _of_policy(full: Prediction, chosen: Prediction, least: float) -> str:
    if chosen.policy == "full":
        others = f"quorum of {least:.0%} of the ranks or more" if least > 0 else "other policy of gradients"
        return f"Full() is the policy to have: no {others} is predicted to be more than {_MARGIN} faster, and nothing is ever stale."
    rounds = f"{chosen.staleness_95:.0f} round{'s' if chosen.staleness_95 > 1 else ''}"
    return (
        f"HOROVOD_PARTIAL_SYNC={chosen.policy}, or sync={chosen.policy!r}, is the policy to have: the program is predicted to "
        f"be {_times(full, chosen)}. {chosen.late:.0%} of the gradients will be late, of which 95 % "
        f"by {rounds} at most: compare the quality after the same time."
    )


def _of_rounds(full: Prediction, unsplit: Prediction, by_rounds: Prediction, counts_rounds: bool) -> str:
    if counts_rounds:
        return "The program counts rounds: its ranks ended together, after different numbers of steps. All predictions assume that."
    if WORTH_A_CHANGE * by_rounds.rate <= 1 / unsplit.seconds:
        return ""
    return (
        "These predictions are for the program as it is: each rank takes the same number of steps, so when fast ranks have ended, "
        "slow ones still have steps to take. If the program counts rounds in place of the steps of each rank, "
        f"HOROVOD_PARTIAL_SYNC={by_rounds.policy} makes it {by_rounds.rate / full.rate:.2f} times as fast as under Full(). A rank "
        "then stops when the sum of "
        "optimizer.steps_in_round over all rounds has reached the number of steps (docs/policies.md, Ranks at their own pace)."
    )


def _of_optimizer(optimizer: str | None, least: float, chosen: Prediction) -> str:
    if optimizer is None and chosen.policy != "full":
        return (
            "In our benchmarks models with SGD bore late gradients, and a Transformer with Adam or Muon did not: if the job has "
            "one of these, pass --optimizer."
        )
    if least == 0:
        return ""
    return (
        f"Quorums below {least:.0%} of the ranks are left out: in our benchmarks a Transformer with such an optimizer ({optimizer}) "
        "lost more by late gradients than the speed gained."
    )


def _of_models(chosen: Prediction, of_models: list[Prediction]) -> str:
    faster = [one for one in of_models if one.seconds < NEAR * chosen.seconds]
    if not faster:
        return ""
    best = min(faster, key=lambda one: one.seconds)
    return (
        f"An average of models would be faster still ({best.policy}: {chosen.seconds / best.seconds:.2f} times that), and changes what is "
        "trained."
    )
