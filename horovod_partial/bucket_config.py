"""The specification of a bucket, from what users say: the same for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_partial import _core, policies
from horovod_partial.checks import is_number, require, require_count
from horovod_partial.policies import FOR_EVER, LONGEST_GRACE_MS, ModelPolicy, Policy, Quorum, Solo
from horovod_partial.settings import settings

REPLAY_LIMIT = 8  # untaken results of an optimizer's buckets


def arguments(
    *,
    sync: Policy,
    size: int | None,
    average: bool,
    is_integer: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    max_staleness: int | None = None,
    grace_ms: float | str | None = None,
    missed: str = "sum",
    divisor: str = "ranks",
    late: str = "accumulate",
    drop_nonfinite: bool = False,
    replay_limit: int | None = None,
    weights: str = "uniform",
    weight_parameter: float = 1.0,
    members: Sequence[str] = (),
    agreed: Sequence[str] = (),
) -> _core.BucketSpec:
    """All that a bucket is declared with, but for its tensor.

    `is_integer` says that whole numbers travel. `None` stands for the setting, or for the default where there is none; as
    `size` it is Horovod's answer for a process set that it does not know. An average is divided by the number of ranks, or,
    with `divisor="contributors"`, as of models, by that of the contributions in the sum. `members` says what lies in the bucket,
    as `member` does, and `agreed` in words what else must be the same on all ranks: round 0 compares both.

    Raises:
        ValueError: an argument is wrong, or the process set is not registered.
    """
    if size is None:
        raise ValueError("the process set is not registered: pass it to hvd.init or hvd.add_process_set first")
    if is_integer and (average or any(factor != int(factor) for factor in (prescale_factor, postscale_factor))):
        raise ValueError(
            "integers cannot be averaged or scaled under a partial policy: each round would cut the fraction off, and late "
            "contributions are spread over several rounds. Pass op=hvd.Sum and divide at the end, reduce floating-point numbers, "
            "or use sync=hvd.Full()"
        )
    if max_staleness is None and "max_staleness" not in settings().model_fields_set:
        max_staleness = getattr(sync, "max_staleness", None)
    if grace_ms is None and "grace_ms" not in settings().model_fields_set:
        grace_ms = getattr(sync, "grace_ms", None)
    if replay_limit is None:
        replay_limit = getattr(sync, "replay_limit", None)
    staleness, grace, limit = check_rounds(max_staleness, grace_ms, replay_limit)
    words = [
        policies.describe(sync, size),
        f"op={'Average' if average else 'Sum'}",
        f"max_staleness={staleness}",
        f"grace_ms={grace}",
    ]
    if missed != "sum":
        words.append(f"missed={missed}")
    if missed == "replay":
        words.append(f"replay_limit={limit}")
    words += agreed
    policy = sync.to_core(size).replace(max_staleness=staleness, description=" ".join(words))
    if not isinstance(grace, str):  # the core's default is "auto"
        policy = policy.replace(grace_seconds=grace / 1e3)
    return _core.BucketSpec(
        policy=policy,
        missed=missed,
        late=late,
        divisor="contributors" if average and divisor == "contributors" else "none",
        drop_nonfinite=drop_nonfinite,
        replay_limit=limit,
        weights=weights,
        weight_parameter=weight_parameter,
        members=list(members),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor / size if average and divisor == "ranks" else postscale_factor,
    )


def member(name: str, shape: Sequence[int]) -> str:
    """A tensor in a bucket, as errors call it."""
    return f"{name} ({', '.join(map(str, shape))})"


def check_rounds(
    max_staleness: int | None, grace_ms: float | str | None, replay_limit: int | None = None
) -> tuple[int, float | str, int]:
    """The bound on staleness in rounds, the grace period in milliseconds, and the limit of missed results, of a bucket.

    None stands for the setting, or for the default where there is none.

    Raises:
        ValueError: an argument is wrong.
    """
    staleness = settings().max_staleness if max_staleness is None else max_staleness
    require_count("max_staleness", staleness, 0)
    grace = settings().grace_ms if grace_ms is None else grace_ms
    fits = grace == "auto" if isinstance(grace, str) else is_number(grace) and 0 <= grace <= LONGEST_GRACE_MS
    require(fits, "grace_ms", f"'auto' or a number of milliseconds, 0 to {LONGEST_GRACE_MS}", grace)
    limit = REPLAY_LIMIT if replay_limit is None else replay_limit
    require_count("replay_limit", limit, 2)
    return staleness, grace, limit


def of_models(policy: ModelPolicy | Quorum) -> dict[str, Any]:
    """The arguments of `arguments` that make a bucket one of models."""
    own = policy.bucket_options() if isinstance(policy, ModelPolicy) else {"late": "discard"}
    return {"missed": "latest", "divisor": "contributors", **own}


def of_signals() -> dict[str, Any]:
    """The arguments of `arguments` for a bucket whose rounds only tell that some rank has arrived: nobody waits."""
    return {"sync": Solo(), "max_staleness": FOR_EVER, "grace_ms": 0.0, "missed": "latest", "late": "discard"}
