"""What tests of merged gradients share on all frameworks."""

from __future__ import annotations

import pytest

from horovod_partial.fusion import MessageCost, planner

EVERYBODY = "quorum:1.0"
ALL = ["full", "solo", "majority", EVERYBODY]
WARMUP = 2
SWITCH = WARMUP + 1  # steps until the plan is there


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> MessageCost:
    """A network that is never busy: probes travel, but their times do not count."""
    cost = MessageCost(1e-4, 1e-9)
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: cost))
    monkeypatch.setattr(planner, "_PROBES", 1)
    return cost
