"""Checks of what users say: the same, with the same words, in every framework."""

from __future__ import annotations

import warnings
from typing import Any

from horovod_partial import policies
from horovod_partial.fusion import MergedGradients
from horovod_partial.policies import GradientPolicy, GroupAverage, ModelPolicy, Policy
from horovod_partial.settings import settings


def is_average(op: int, average: int, total: int) -> bool:
    """Whether a partial collective divides.

    Args:
        op: what the user asked for.
        average: the number of the framework's `hvd.Average`.
        total: that of its `hvd.Sum`.

    Raises:
        ValueError: it is another operation.
    """
    if op not in (average, total):
        raise ValueError(
            "partial collectives reduce with op=hvd.Average or hvd.Sum; use sync=hvd.Full() for the others"
        )
    return op == average


def of_allreduce(sync: Policy | str | None, missed: str | None) -> tuple[GradientPolicy, str]:
    """The policy of a single allreduce, and what a late rank gets.

    Raises:
        ValueError: `sync` averages models, or `missed` is not `sum` or `latest`.
    """
    policy = policies.resolve(sync, settings().sync)
    missed = "sum" if missed is None else missed
    if missed not in ("sum", "latest"):
        raise ValueError(
            f"missed must be 'sum' or 'latest' here, not {missed!r}: one tensor cannot hold several results"
        )
    if isinstance(policy, ModelPolicy):
        raise ValueError(  # noqa: TRY004 (it is the policy that does not fit)
            f"{policy!r} averages models: use hvd.group_allreduce, hvd.partial_reduce or hvd.weighted_average, or pass it "
            "to hvd.DistributedOptimizer"
        )
    return policy, missed


def check_fusion(fusion: Any, groups: Any) -> None:
    """Refuse what is no `MergedGradients`, or goes with groups.

    Raises:
        TypeError: it is something else.
        ValueError: there are groups too.
    """
    if fusion is None:
        return
    if not isinstance(fusion, MergedGradients):
        raise TypeError(f"fusion must be hvd.MergedGradients(...), not {fusion!r}")
    if groups is not None:
        raise ValueError("give fusion or groups, not both: each says which gradients travel together")


def with_num_groups(groups: Any, num_groups: int) -> Any:
    """`groups`, where Horovod's deprecated argument may stand for it. To be called by what the user calls."""
    if num_groups == 0:
        return groups
    warnings.warn(
        "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


def check_gradient_arguments(arguments: dict[str, Any]) -> None:
    """Horovod's checks of the arguments of an optimizer of Keras or a tape, with its messages; settles `missed`."""
    groups = arguments["groups"]
    check_fusion(arguments["fusion"], groups)
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of lists of variables.")
    missed = arguments["missed"]
    if missed not in (None, "auto", "sum", "latest"):
        raise ValueError(
            f"missed must be 'auto', 'sum' or 'latest' with Keras and TensorFlow, not {missed!r}: an optimizer of Keras "
            "counts its steps for all variables together, and cannot replay those of one bucket"
        )
    if missed in (None, "auto"):
        default = settings().missed
        arguments["missed"] = default if default == "latest" else "sum"


def refuse_about_gradients(policy: ModelPolicy, arguments: dict[str, Any], *, uncompressed: Any, average: int) -> None:
    """Refuse arguments that mean nothing to a policy of models.

    Args:
        policy: has rounds that may be missed, or held open, only if it is `GroupAverage`.
        arguments: of an optimizer, as the user gave them; those that a framework does not have may be left out.
        uncompressed: the framework's `hvd.Compression.none`.
        average: the number of the framework's `hvd.Average`.

    Raises:
        ValueError: there are such arguments.
    """
    left_alone = {
        "compression": uncompressed,
        "op": average,
        "gradient_predivide_factor": 1.0,
        "groups": None,
        "fusion": None,
        "missed": None,
        "divisor": "ranks",
        "model_sync_every": None,
    }
    if not isinstance(policy, GroupAverage):
        left_alone |= {"max_staleness": None, "grace_ms": None}
    given = [name for name, value in left_alone.items() if arguments.get(name, value) != value]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be used with {policy!r}, which averages models and no gradients")
