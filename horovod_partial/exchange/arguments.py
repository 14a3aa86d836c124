"""Checks of what users say: the same, with the same words, in every framework."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from horovod.common.process_sets import ProcessSet

from horovod_partial import bucket_config, policies
from horovod_partial.checks import is_flag, is_int, is_number, require
from horovod_partial.fusion import MergedGradients
from horovod_partial.policies import Auto, Full, GradientPolicy, GroupAverage, ModelPolicy, Policy, Quorum, Solo
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


def of_allreduce(sync: Policy | str | None, arguments: Mapping[str, Any]) -> tuple[GradientPolicy, str]:
    """The policy of a single allreduce, and what a late rank gets.

    Args:
        sync: as the user gave it.
        arguments: all others.

    Raises:
        ValueError: `sync` averages models, or an argument is wrong.
    """
    check_kinds(arguments)
    policy = policies.resolve(sync, settings().sync)
    missed = "sum" if arguments["missed"] is None else arguments["missed"]
    if missed not in ("sum", "latest"):
        raise ValueError(
            f"missed must be 'sum' or 'latest' here, not {missed!r}: one tensor cannot hold several results"
        )
    if isinstance(policy, ModelPolicy):
        raise ValueError(
            f"{policy!r} averages models: use hvd.group_allreduce, hvd.partial_reduce or hvd.weighted_average, or pass it "
            "to hvd.DistributedOptimizer"
        )
    check_about_rounds(sync, policy, arguments)
    return policy, missed


# What says how rounds close and what a late rank gets, by its default.
_ABOUT_ROUNDS = {
    "max_staleness": None,
    "grace_ms": None,
    "missed": None,
    "replay_limit": None,
}


def check_about_rounds(sync: Policy | str | None, policy: GradientPolicy, arguments: Mapping[str, Any]) -> None:
    """Check what users say of rounds, also where the policy has none. To be called by what the user calls.

    Args:
        sync: as the user gave it.
        policy: what it stands for.
        arguments: with `max_staleness` and `grace_ms`, and `replay_limit` where there is one.

    Raises:
        ValueError: an argument is wrong.
    """
    bucket_config.check_rounds(arguments["max_staleness"], arguments["grace_ms"], arguments.get("replay_limit"))
    if not isinstance(policy, Full) or sync is not None or "sync" in settings().model_fields_set:
        return
    given = [name for name, default in _ABOUT_ROUNDS.items() if arguments.get(name, default) != default]
    if given:
        warnings.warn(
            f"{', '.join(given)} has no effect: no policy is named, and the default, hvd.Full(), has no rounds; pass "
            "sync=hvd.Majority(), or set HOROVOD_PARTIAL_SYNC",
            stacklevel=3,
        )


def warn_of_late_gradients(policy: Policy, optimizer: Any) -> None:
    """Say that late gradients may cost this optimizer more than not waiting gains. To be called by what the user calls."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__} & {"Adam", "AdamW", "Muon"}
    if kinds and (isinstance(policy, Solo) or policy == Auto()):
        warnings.warn(
            f"{type(optimizer).__name__} under {policy!r}: most gradients may be late, which may cost more than it gains. A Transformer "
            "in our benchmarks was better under Full() with fewer steps, in the same time. Compare it with hvd.WorkSharing(), "
            "hvd.BalancedBatchSampler or hvd.Quorum(0.75): see 'Which optimizer' in docs/policies.md",
            stacklevel=3,
        )


def check_compression(compression: Any) -> None:
    """Refuse what cannot compress.

    Raises:
        ValueError: it has not the methods of Horovod's compressions.
    """
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ValueError(
            f"compression must be one of hvd.Compression, or a class with compress and decompress, not {compression!r}"
        )


def warn_of_float32() -> None:
    """Say that gradients which were to be compressed to float16 are not."""
    warnings.warn(
        "gradients travel as float32 although compression asks for float16: under a partial policy they travel without the loss "
        "scale, and small ones would be 0",
        stacklevel=3,
    )


def _is_groups(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(group, list | tuple) and all(hasattr(one, "shape") for one in group) for group in value)
    return value is None or (is_int(value) and value >= 0)


_FACTOR = (is_number, "a number")
_FLAG = (is_flag, "True or False")
_TEXT = (lambda value: value is None or isinstance(value, str), "a text")

# Whether an argument is of the right kind, and what is: by its name, which means the same wherever it is.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "average_aggregated_gradients": _FLAG,
    "backward_passes_per_step": (lambda value: is_int(value) and value >= 1, "an int, 1 or more"),
    "device": _TEXT,
    "device_dense": _TEXT,
    "device_sparse": _TEXT,
    "gradient_predivide_factor": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "groups": (_is_groups, "an int, 0 or more, or a list of lists of parameters or variables"),
    "name": _TEXT,
    "named_buffers": (lambda value: value is None or isinstance(value, Iterable), "model.named_buffers()"),
    "named_parameters": (lambda value: value is None or isinstance(value, Iterable), "model.named_parameters()"),
    # Numbers of Horovod's, of which a front end may lack some.
    "op": (lambda value: is_int(value) and 0 <= value < 6, "hvd.Average, or another of Horovod's operations"),
    "postscale_factor": _FACTOR,
    "prescale_factor": _FACTOR,
    "process_set": (lambda value: isinstance(value, ProcessSet), "a ProcessSet"),
    "return_info": _FLAG,
    "scale_local_gradients": _FLAG,
    "sparse_as_dense": _FLAG,
}


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a wrong kind, among them a policy that is not named, and so lands in another's place.

    Raises:
        ValueError: there is one.
    """
    for name, value in arguments.items():
        fits, allowed = _KINDS.get(name, (None, ""))
        if fits is not None and fits(value):
            continue
        if isinstance(value, Policy):
            raise ValueError(f"{name} is {value!r}, which is a policy: name the argument, sync={value!r}")
        require(fits is None, name, allowed, value)


def check_fusion(fusion: Any, groups: Any) -> None:
    """Refuse what is no `MergedGradients`, or goes with groups.

    Raises:
        ValueError: it is.
    """
    if fusion is None:
        return
    require(isinstance(fusion, MergedGradients), "fusion", "hvd.MergedGradients(...)", fusion)
    if groups is not None:
        raise ValueError("give fusion or groups, not both: each says which gradients travel together")


def with_num_groups(groups: Any, num_groups: int) -> Any:
    """`groups`, where Horovod's deprecated argument may stand for it. To be called by what the user calls.

    Raises:
        ValueError: it is no number of groups.
    """
    require(is_int(num_groups) and num_groups >= 0, "num_groups", "an int, 0 or more", num_groups)
    if num_groups == 0:
        return groups
    warnings.warn(
        "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


def check_gradient_arguments(policy: Policy, arguments: dict[str, Any], *, replays: bool) -> None:
    """Horovod's checks of the arguments of an optimizer of Keras or a tape, with its messages; settles `missed`.

    Warns where missed results are added up although nobody has asked for it.

    Args:
        policy: of the user's choice.
        arguments: as the user gave them.
        replays: missed rounds can be applied one by one, which is the default then.

    Raises:
        ValueError: an argument is wrong.
    """
    check_compression(arguments["compression"])
    groups = arguments["groups"]
    check_fusion(arguments["fusion"], groups)
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of lists of variables.")
    missed = settings().missed if arguments["missed"] is None else arguments["missed"]
    if missed not in ("auto", "sum", "latest", "replay"):
        raise ValueError(f"missed must be 'auto', 'sum', 'replay' or 'latest', not {missed!r}")
    if missed == "replay" and not replays and arguments["missed"] is not None:
        raise ValueError(
            "missed='replay' cannot be used with a tape, or with fusion in TensorFlow: a step gets one gradient of each "
            "variable there; use 'sum' or 'latest', or hvd.DistributedOptimizer without fusion"
        )
    if missed in ("auto", "replay"):
        missed = "replay" if replays else "sum"
        if not replays and policy not in (Full(), Quorum(1.0)):
            warnings.warn(
                "what a late rank has missed is added up, in a tape, or with fusion in TensorFlow, so that replicas part with any "
                "optimizer but plain SGD: leave the tape as it is, and use hvd.DistributedOptimizer without fusion; or pass "
                "missed='sum' if sums are wanted",
                stacklevel=3,
            )
    arguments["missed"] = missed


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
    } | _OF_MISSED_ROUNDS
    if not isinstance(policy, GroupAverage):
        left_alone |= _OF_OPEN_ROUNDS
    _refuse(arguments, left_alone, f"{policy!r}, which averages models and no gradients")


def refuse_about_late_gradients(arguments: dict[str, Any]) -> None:
    """Refuse arguments that mean nothing where work is shared.

    Args:
        arguments: of an optimizer, as the user gave them.

    Raises:
        ValueError: there are such arguments.
    """
    _refuse(arguments, _OF_MISSED_ROUNDS | _OF_OPEN_ROUNDS, "hvd.WorkSharing(), under which no gradient is late")


def _refuse(arguments: dict[str, Any], left_alone: dict[str, Any], policy: str) -> None:
    given = [name for name, value in left_alone.items() if arguments.get(name, value) != value]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be used with {policy}")


# Arguments by name, as they are where nobody gives them.
_OF_MISSED_ROUNDS: dict[str, Any] = {
    "fusion": None,
    "missed": None,
    "replay_limit": None,
}
_OF_OPEN_ROUNDS: dict[str, Any] = {"max_staleness": None, "grace_ms": None}
