"""Makes the core's specification of a bucket from a policy and from arguments of users, for every framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_partial import _core, policies
from horovod_partial.policies import FOR_EVER, LateGradients, ModelPolicy, Policy, Quorum, SharedUpdates, Solo

# The dtypes that Horovod reduces in every framework, each with its number in Horovod's C++ code.
DTYPES = {"int32": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8}
INTERNAL = "horovod_partial."  # the prefix of the names of internal buckets. Statistics leave internal buckets out


def arguments(
    *,
    sync: Policy | SharedUpdates,
    size: int | None,
    average: bool,
    is_integer: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    missed: str = "sum",
    divisor: str = "ranks",
    grants: bool = False,
    members: Sequence[str] = (),
    agreed: Sequence[str] = (),
    **handling: Any,
) -> _core.BucketSpec:
    """Return all that a bucket is declared with, except the shape, the type and the place of its tensor.

    `average` says whether the sum of a round is divided, and `divisor` by what: the number of `"ranks"`, or of
    `"contributors"` to the sum. `prescale_factor` multiplies each contribution, `postscale_factor` each result.
    `missed` says what becomes of missed results: `"sum"`, `"latest"` or `"replay"`. Under `SharedUpdates`, `grants` says
    whether the bucket's messages also assign micro-batches to ranks, and report which micro-batches have begun.
    `members` has a text from `member` for each tensor in the bucket. `agreed` says in words what else must be the same
    on all ranks. In round 0 ranks compare `members` and `agreed`. `handling` has further fields of `BucketSpec`, such
    as `late` (cpp/core/rounds/bucket_spec.h explains them).

    Raises ValueError if an argument is wrong, or if `size` is None, Horovod's answer for an unknown process set.
    """
    if size is None:
        raise ValueError("the process set is not registered: pass it to hvd.init or hvd.add_process_set first")
    if is_integer and (average or any(factor != int(factor) for factor in (prescale_factor, postscale_factor))):
        raise ValueError(
            "integers cannot be averaged or scaled under a partial policy: each round would cut the fraction off, and late "
            "contributions are spread over several rounds. Pass op=hvd.Sum and divide at the end, reduce floating-point numbers, "
            "or use sync=hvd.Full()"
        )
    words = [policies.describe(sync, size), f"op={'Average' if average else 'Sum'}"]
    if missed == "replay":
        words.append("missed=replay")
    words += agreed
    if isinstance(sync, LateGradients):
        handling["replay_limit"] = sync.replay_limit
    return _core.BucketSpec(
        policy=sync.to_core(size).replace(description=" ".join(words), grants=grants),
        missed=missed,
        divisor="contributors" if average and divisor == "contributors" else "none",
        members=list(members),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor / size if average and divisor == "ranks" else postscale_factor,
        **handling,
    )


def member(name: str, shape: Sequence[int]) -> str:
    """Return the text by which errors name a tensor in a bucket: its name and its shape."""
    return f"{name} ({', '.join(map(str, shape))})"


def missed_by(policy: Policy | SharedUpdates, *, replays: bool) -> str:
    """Return what becomes of the results that a rank has missed, in the core's words: `latest`, `replay` or `sum`.

    `replays` says whether the front end can apply each missed result by itself, or takes only their sum.
    """
    if isinstance(policy, LateGradients) and policy.missed == "latest":
        return "latest"
    return "replay" if replays else "sum"


def of_models(policy: ModelPolicy | Quorum) -> dict[str, Any]:
    """Return the keyword arguments of `arguments` for a bucket whose contributions are models."""
    own = policy.bucket_options() if isinstance(policy, ModelPolicy) else {"late": "discard"}
    return {"missed": "latest", "divisor": "contributors", **own}


def of_signals() -> dict[str, Any]:
    """Return the keyword arguments of `arguments` for a bucket whose rounds only tell that some rank has arrived.

    Only the first round waits for all ranks. Each later one closes when the first rank arrives.
    """
    return {"sync": Solo(max_staleness=FOR_EVER, grace_ms=0), "missed": "latest", "late": "discard"}
