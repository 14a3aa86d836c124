"""Checks of the arguments that users give, with the same messages in every framework."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from horovod.common.process_sets import ProcessSet

from horovod_partial import policies
from horovod_partial.checks import is_flag, is_int, is_number, require, require_count
from horovod_partial.policies import (
    GradientPolicy,
    LateGradients,
    ModelPolicy,
    Policy,
    Quorum,
    Solo,
    WeightedAverage,
    WorkSharing,
)
from horovod_partial.runtime import bucket_config
from horovod_partial.settings import settings

if TYPE_CHECKING:
    from horovod_partial.runtime.runtime import Runtime


AVERAGE, SUM = 0, 1  # Horovod's numbers for two reduce operations, the same in every framework


def is_average(op: int) -> bool:
    """Return whether `op` is Average, not Sum. Any other `op` raises ValueError."""
    if op not in (AVERAGE, SUM):
        raise ValueError(
            "partial collectives reduce with op=hvd.Average or hvd.Sum; use sync=hvd.Full() for the others"
        )
    return op == AVERAGE


def check_predivide(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if `gradient_predivide_factor` is given and `op` is not Average."""
    if arguments["gradient_predivide_factor"] != 1.0 and arguments["op"] != AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")


def check_sampler(batch_size: Any, process_set: Any, **flags: Any) -> None:
    """Check the arguments of all samplers; `flags` must be True or False. Raises ValueError if one is wrong."""
    require_count("batch_size", batch_size, 1)
    for name, flag in flags.items():
        require(is_flag(flag), name, "True or False", flag)
    require(isinstance(process_set, ProcessSet), "process_set", "a process set", process_set)
    require(process_set.included() is not False, "process_set", "one that this rank is in", process_set)


def of_allreduce(sync: Policy | str | None, arguments: Mapping[str, Any]) -> GradientPolicy:
    """Return the policy for `hvd.partial_allreduce`. If `sync` is None, `HOROVOD_PARTIAL_SYNC` decides.

    Raises ValueError if `sync` averages models, or one of the other `arguments` is wrong.
    """
    check_kinds(arguments)
    policy = policies.resolve(sync, settings().sync)
    if isinstance(policy, ModelPolicy):
        raise ValueError(f"{policy!r} averages models: pass it to hvd.average or hvd.DistributedOptimizer")
    return policy


def of_average(policy: ModelPolicy | str, steps: Any) -> ModelPolicy:
    """Return the policy for `hvd.average`, from the user's arguments. `steps` is None if the user gave none.

    Raises ValueError if the policy averages no models, or has fields for optimizers only. Also raises ValueError if
    `steps` is not a count, is missing, or is given although the policy does not use it.
    """
    chosen = policies.parse(policy) if isinstance(policy, str) else policy
    if not isinstance(chosen, ModelPolicy):
        raise ValueError(f"policy must be one that averages models, such as hvd.GroupAverage(), not {policy!r}")
    given = {field.name for field in fields(chosen) if getattr(chosen, field.name) != field.default}
    for_optimizers = sorted(given & {"average", "overlap"})
    if for_optimizers:
        raise ValueError(
            f"{', '.join(for_optimizers)} of a policy cannot be used with hvd.average, only with an optimizer"
        )
    if isinstance(chosen, WeightedAverage):
        require_count("steps", steps, 0)
    else:
        require(steps is None, "steps", f"left out under {chosen!r}, which does not weigh models by their steps", steps)
    return chosen


def warn_of_policy(runtime: Runtime, policy: Policy, optimizer: Any = None, passes: int = 0) -> None:
    """On rank 0, warn the user of a policy that does not suit the number of ranks, `passes` or the optimizer.

    If `optimizer` is None, a gradient tape has the policy.
    """
    size = runtime.size() if runtime.is_initialized() else 0
    if size and runtime.rank() != 0:
        return
    texts = []
    if isinstance(policy, Quorum) and not policy.is_share and 0 < size < policy.ranks:
        texts.append(
            f"{policy!r} asks for {policy.ranks} ranks, and there are {size}: each round waits for all of them. A share of the "
            "ranks is a float, such as hvd.Quorum(0.75)"
        )
    if isinstance(policy, WorkSharing) and passes == 1 and size > 1:
        texts.append(
            "WorkSharing() with one backward pass per step has a single micro-batch for each rank, so a slow rank has none to "
            "give away: pass backward_passes_per_step, such as 4, and make the micro-batches as much smaller"
        )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__} & {"Adam", "AdamW", "Muon"}
    if kinds and isinstance(policy, Solo):
        texts.append(
            f"{type(optimizer).__name__} under {policy!r}: most gradients may be late, which may cost more than it gains. A Transformer "
            "in our benchmarks was better under Full() with fewer steps, in the same time. Compare it with hvd.WorkSharing(), "
            "hvd.BalancedBatchSampler or hvd.Quorum(0.75): see 'Which optimizer' in docs/policies.md"
        )
    waits_for_all = isinstance(policy, Quorum) and policy.is_share and policy.ranks == 1.0
    if optimizer is None and isinstance(policy, LateGradients) and policy.missed == "replay" and not waits_for_all:
        texts.append(
            "a tape adds up the results that a late rank has missed. So replicas part with any optimizer but plain SGD: use "
            "a plain tape, and hvd.DistributedOptimizer"
        )
    for text in texts:
        warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """Return the `stacklevel` with which the caller's warning shows the user's line, not a library's or AutoGraph's."""
    for level, (frame, _) in enumerate(traceback.walk_stack(sys._getframe(1)), start=1):
        library = str(frame.f_globals.get("__name__")).partition(".")[0] in {"horovod_partial", "tensorflow", "keras"}
        if not library and "__autograph_generated_file" not in frame.f_code.co_filename:
            return level
    return 1


def check_compression(compression: Any) -> None:
    """Raise a ValueError if an optimizer's `compression` lacks a method `compress` or `decompress`."""
    fits = all(callable(getattr(compression, name, None)) for name in ("compress", "decompress"))
    require(fits, "compression", "one of hvd.Compression, or a class with compress and decompress", compression)


def warn_of_float32() -> None:
    """Warn the user that gradients travel as float32, although `compression` asks for float16."""
    warnings.warn(
        "gradients travel as float32 although compression asks for float16: under a partial policy they travel without the loss "
        "scale, and small ones would be 0",
        stacklevel=3,
    )


def _is_groups(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(group, list | tuple) and all(hasattr(one, "shape") for one in group) for group in value)
    return value is None or (is_int(value) and value >= 0)


def is_name(value: Any) -> bool:
    """Return whether a value may be the name of an operation. None, no name, is allowed for some operations."""
    return value is None or (isinstance(value, str) and not value.startswith(bucket_config.INTERNAL))


_FACTOR = (is_number, "a number")
_FLAG = (is_flag, "True or False")
_TEXT = (lambda value: value is None or isinstance(value, str), "a text")

# For each argument of public functions, by name: a check of its value, and words for the allowed values.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "average_aggregated_gradients": _FLAG,
    "backward_passes_per_step": (lambda value: is_int(value) and value >= 1, "an int, 1 or more"),
    "device": _TEXT,
    "device_dense": _TEXT,
    "device_sparse": _TEXT,
    "gradient_predivide_factor": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "groups": (_is_groups, "an int, 0 or more, or a list of lists of parameters or variables"),
    "name": (is_name, f"a text that does not begin with {bucket_config.INTERNAL!r}, which is for internal buckets"),
    "named_buffers": (lambda value: value is None or isinstance(value, Iterable), "model.named_buffers()"),
    "named_parameters": (lambda value: value is None or isinstance(value, Iterable), "model.named_parameters()"),
    # `op` is the number of a reduce operation of Horovod, 0 to 5. Some frameworks lack some operations.
    "op": (lambda value: is_int(value) and 0 <= value < 6, "hvd.Average, or another of Horovod's operations"),
    "postscale_factor": _FACTOR,
    "prescale_factor": _FACTOR,
    "process_set": (
        lambda value: isinstance(value, ProcessSet) and value.process_set_id is not None,
        "a ProcessSet that is registered, and was not removed",
    ),
    "return_info": _FLAG,
    "scale_local_gradients": _FLAG,
    "sparse_as_dense": _FLAG,
}


def check_kinds(arguments: Mapping[str, Any]) -> None:
    """Check the types of arguments. A wrong type raises ValueError.

    This also finds a policy that was passed by position in place of another argument.
    """
    for name, value in arguments.items():
        fits, allowed = _KINDS.get(name, (None, ""))
        if fits is not None and fits(value):
            continue
        if isinstance(value, Policy):
            raise ValueError(f"{name} is {value!r}, which is a policy: name the argument, sync={value!r}")
        require(fits is None, name, allowed, value)


def with_num_groups(groups: Any, num_groups: int) -> Any:
    """Return `groups`, or Horovod's deprecated `num_groups` if `groups` is None. Warns if `num_groups` is given.

    Must be called directly by the function that the user calls, so that the warning names the user's line. Raises
    ValueError unless `num_groups` is an int of 0 or more.
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


def check_gradient_arguments(arguments: dict[str, Any]) -> None:
    """Check the arguments of a Keras optimizer or a gradient tape. Raises ValueError with Horovod's texts."""
    check_compression(arguments["compression"])
    groups = arguments["groups"]
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ValueError("groups should be a non-negative integer or a list of lists of variables.")


def refuse_about_gradients(policy: ModelPolicy, arguments: dict[str, Any], uncompressed: Any) -> None:
    """Raise a ValueError if an argument about gradients differs from its default, because `policy` averages models.

    `uncompressed` is the framework's `hvd.Compression.none`. `arguments` has no entry for an argument that the
    framework lacks.
    """
    left_alone = {
        "compression": uncompressed,
        "op": AVERAGE,
        "gradient_predivide_factor": 1.0,
        "groups": None,
        "merging": None,
    }
    given = [name for name, value in left_alone.items() if arguments.get(name, value) != value]
    if given:
        raise ValueError(f"{', '.join(given)} cannot be used with {policy!r}, which averages models and no gradients")
