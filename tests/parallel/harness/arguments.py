"""Arguments that `DistributedOptimizer` and `DistributedGradientTape` refuse on every front end."""

from __future__ import annotations

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
    with pytest.raises(TypeError, match="sync must be a policy"):
        wrap(sync=1)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(num_groups=1)
