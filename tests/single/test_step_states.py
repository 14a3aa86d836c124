"""The states of a PyTorch optimizer's step, without ranks: which event leads where, and what each state allows."""

import pytest

from horovod_partial.torch.late_gradients import Phase, StepState

COLLECTING, SHOWN, LEFT, AHEAD = Phase
START = StepState()

# The states of a program under a policy that replays rounds, by phase, whether there is a result, and whether more wait.
STATES = {
    "collecting": START,
    "shown": START.waited(has_result=True).watched(misses_more=False),
    "shown, more wait": START.waited(has_result=True).watched(misses_more=True),
    "shown, empty": START.waited(has_result=False).watched(misses_more=False),
    "shown by a step that failed": START.waited(has_result=True).watched(misses_more=True).applying(changed=False),
    "left": START.waited(has_result=True).watched(misses_more=False).gradient(),
    "left, more wait": START.waited(has_result=True).watched(misses_more=True).gradient(),
    "left, empty": START.waited(has_result=False).watched(misses_more=False).gradient(),
    "ahead": START.waited(has_result=True).ahead(),
}
ERROR = "error"

# For each state, where it leads: a gradient; a step; a step after a change by hand; no step; no step, gradients are late.
ARROWS = {
    "collecting": (COLLECTING, COLLECTING, COLLECTING, COLLECTING, COLLECTING),
    "shown": (LEFT, SHOWN, SHOWN, COLLECTING, ERROR),
    "shown, more wait": (LEFT, SHOWN, ERROR, ERROR, ERROR),
    "shown, empty": (LEFT, SHOWN, SHOWN, COLLECTING, COLLECTING),
    "shown by a step that failed": (LEFT, SHOWN, SHOWN, COLLECTING, COLLECTING),
    "left": (LEFT, LEFT, LEFT, COLLECTING, ERROR),
    "left, more wait": (LEFT, LEFT, ERROR, ERROR, ERROR),
    "left, empty": (LEFT, LEFT, LEFT, COLLECTING, COLLECTING),
    "ahead": (AHEAD, SHOWN, ERROR, ERROR, ERROR),
}

# For each state: nothing is left to wait for; a flush may not come; a result is left out; rounds may be applied ahead.
FACTS = {
    "collecting": (False, False, False, True),
    "shown": (True, True, True, False),
    "shown, more wait": (True, True, True, False),
    "shown, empty": (True, False, False, False),
    "shown by a step that failed": (True, True, False, False),
    "left": (False, True, True, False),
    "left, more wait": (False, True, True, False),
    "left, empty": (False, False, False, True),
    "ahead": (True, True, True, True),
}

EVENTS = (
    lambda state: state.gradient(),
    lambda state: state.applying(changed=False),
    lambda state: state.applying(changed=True),
    lambda state: state.left_out(had_late=False),
    lambda state: state.left_out(had_late=True),
)


@pytest.mark.parametrize("name", STATES)
def test_each_event_leads_to_one_state(name: str) -> None:
    state = STATES[name]
    for event, expected in zip(EVENTS, ARROWS[name], strict=True):
        try:
            after = event(state)
        except RuntimeError:
            assert expected == ERROR
            continue
        assert after.phase is expected
        if after.phase is COLLECTING:
            assert after == START
        assert after.has_result == (state.has_result and after.phase is not COLLECTING)


@pytest.mark.parametrize("name", STATES)
def test_what_a_state_allows(name: str) -> None:
    state = STATES[name]
    facts = state.is_synchronized, state.waits_for_step, state.leaves_out, state.allows_ahead
    assert facts == FACTS[name]


def test_a_result_in_use_is_not_watched() -> None:
    assert all(not state.applying(changed=False).is_watched for state in STATES.values())
    assert all(not state.applying(changed=False).misses_more for state in STATES.values())
