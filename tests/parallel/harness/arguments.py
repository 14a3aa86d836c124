"""Arguments that `DistributedOptimizer` and `DistributedGradientTape` refuse on every front end."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from horovod.common.process_sets import ProcessSet

from horovod_partial.merging import MergedGradients
from horovod_partial.policies import Majority

# Values of a wrong kind, by the name of the argument. Where None is not among them it is allowed.
NONSENSE: dict[str, list[Any]] = {
    "average_aggregated_gradients": ["yes", None, [True]],
    "backward_passes_per_step": ["1", 1.5, True, None, [1], int, 0],
    "compression": ["fp16", 1, True, None, object],
    "device_dense": [1, ["cpu"]],
    "device_sparse": [1, ["cpu"]],
    "merging": ["exact", 1, True, [1], MergedGradients],
    "grad_scaler": [1, "x", True, object],
    "grad_transform": [1, "x", True, [1]],
    "gradtape": [None, 1, "x", object],
    "gradient_predivide_factor": ["1", True, None, [1], float, math.nan, 0],
    "groups": ["2", 1.5, True, [1], ["ab"], int, -1],
    "max_grad_norm": ["1", True, [1], float, math.nan, 0],
    "max_grad_value": ["1", True, [1], float, 0],
    "name": [1, True, ["a"]],
    "named_buffers": [1, True],
    "named_parameters": [1, True],
    "num_groups": ["2", 1.5, True, None, [1]],
    "op": ["Average", 1.5, True, None, [1], int, 77],
    "optimizer": [None, 1, "sgd", object],
    "process_set": ["x", 1, None, [0, 1], ProcessSet],
    "scale_local_gradients": ["yes", None, [True]],
    "sparse_as_dense": ["yes", None, [True]],
    "sync": [1, 1.5, True, [1], object, Majority],
}


def check_nonsense(call: Callable[..., Any], nonsense: Mapping[str, Sequence[Any]]) -> None:
    """Check that each of these values is refused in one line, which names the argument and what was given."""
    for name, values in nonsense.items():
        for value in values:
            with pytest.raises(ValueError, match=f"{name} (must|cannot) be [^\\n]*$") as caught:  # noqa: PT012
                call(**{name: value})
                print(f"{name}={value!r} was accepted")
            if "cannot be used with" not in str(caught.value):
                assert repr(value)[:20] in str(caught.value)


def check_refusals(hvd: Any, wrap: Callable[..., Any], more: list[tuple[dict[str, Any], str]]) -> None:
    """Check that `wrap`, which passes its options on, raises ValueError for those that are wrong, and for `more`."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync": "most"}, "unknown sync policy"),
        ({"sync": "solo:max_staleness=-1"}, "max_staleness must be"),
        ({"op": hvd.Max}, "hvd.Average or hvd.Sum"),
        ({"op": hvd.Adasum}, "hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups must be"),
    ]
    for options, text in [*cases, *more]:
        with pytest.raises(ValueError, match=text):
            wrap(**({"sync": "solo"} | options))
    check_misplaced_arguments(hvd, wrap)
    with pytest.raises(ValueError, match="sync must be a policy"):
        wrap(sync=1)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(num_groups=1)


def check_misplaced_arguments(hvd: Any, wrap: Callable[..., Any]) -> None:
    """Check that a policy is found that was passed by position, as another argument."""
    misplaced = [
        ({"compression": hvd.Majority()}, r"compression is Majority\(.*sync=Majority\("),
        ({"op": hvd.Solo()}, r"op is Solo\(.*sync=Solo\("),
        ({"compression": "fp16"}, "compression must be one of hvd.Compression"),
    ]
    for sync in (None, "full", "solo"):
        for options, text in misplaced:
            with pytest.raises(ValueError, match=text):
                wrap(sync=sync, **options)
