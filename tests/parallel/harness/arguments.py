"""Arguments that `DistributedOptimizer` and `DistributedGradientTape` refuse on every front end."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest


def check_refusals(hvd: Any, wrap: Callable[..., Any], more: list[tuple[dict[str, Any], str]]) -> None:
    """Check that `wrap`, which passes its options on, raises ValueError for those that are wrong, and for `more`."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync": "most"}, "unknown sync policy"),
        ({"missed": "none"}, "missed must be"),
        ({"divisor": "none"}, "divisor must be"),
        ({"max_staleness": -1}, "max_staleness must be"),
        ({"grace_ms": -1}, "grace_ms must be"),
        ({"op": hvd.Max}, "hvd.Average or hvd.Sum"),
        ({"op": hvd.Adasum}, "hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": -1}, "groups should be"),
    ]
    for options, text in [*cases, *more]:
        with pytest.raises(ValueError, match=text):
            wrap(**({"sync": "solo"} | options))
    check_arguments_without_rounds(hvd, wrap)
    with pytest.raises(TypeError, match="sync must be a policy"):
        wrap(sync=1)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(num_groups=1)


def check_arguments_without_rounds(hvd: Any, wrap: Callable[..., Any]) -> None:
    """Check that what is said of rounds is checked under `Full()` too, and does not pass in silence by default."""
    misplaced = [
        ({"compression": hvd.Majority()}, r"compression is Majority\(.*sync=Majority\("),
        ({"op": hvd.Solo()}, r"op is Solo\(.*sync=Solo\("),
        ({"compression": "fp16"}, "compression must be one of hvd.Compression"),
    ]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"divisor": "nonsense"}, "divisor must be"),
        ({"max_staleness": -1}, "max_staleness must be"),
        ({"grace_ms": "long"}, "grace_ms must be"),
        ({"missed": "none"}, "missed must be"),
    ]
    for sync in (None, "full", "solo"):
        for options, text in misplaced + wrong:
            with pytest.raises(ValueError, match=text):
                wrap(sync=sync, **options)
    with pytest.warns(UserWarning, match=r"grace_ms, divisor has no effect: no policy is named"):
        wrap(divisor="contributors", grace_ms=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(divisor="contributors", grace_ms=1.0, sync="full")  # says so, as a program does that compares policies
