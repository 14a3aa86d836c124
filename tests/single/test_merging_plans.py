"""Plans of merged gradients: fits, rules, files, arguments."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from horovod_partial import cli, merging
from horovod_partial.merging import MergedGradients, MergingPlan, MessageCost
from horovod_partial.merging.planner import Gradient, Planner
from horovod_partial.merging.steps import Steps, StepTimes

SIZES = [2**n for n in range(15, 22)]


def line(latency: float, seconds_per_byte: float) -> list[float]:
    return [latency + seconds_per_byte * size for size in SIZES]


def example() -> MergingPlan:
    return merging.plan("exact", ["c", "b", "a"], [2, 1, 1], [1.0, 3.0, 6.0], MessageCost(3.0, 1.0), around=0.5)


# --- Fit --------------------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_line() -> None:
    cost = MessageCost.fit(SIZES, line(1e-3, 2e-9))
    assert cost.latency == pytest.approx(1e-3)
    assert cost.seconds_per_byte == pytest.approx(2e-9)
    assert cost.r_squared == pytest.approx(1.0)


def test_an_outlier_does_not_move_the_line_but_spoils_its_quality() -> None:
    times = line(1e-3, 2e-9)
    times[3] *= 1.2
    cost = MessageCost.fit(SIZES, times)
    assert cost.latency == pytest.approx(1e-3, rel=0.05)
    assert cost.seconds_per_byte == pytest.approx(2e-9, rel=0.05)
    assert 0.95 < cost.r_squared < 1.0
    times[3] *= 3
    with pytest.raises(ValueError, match="do not lie on a line"):
        MessageCost.fit(SIZES, times)


def test_noise_is_refused() -> None:
    seed = 1
    print(f"seed {seed}")
    noise = random.Random(seed)
    with pytest.raises(ValueError, match=r"do not (lie on a line|grow)"):
        MessageCost.fit(SIZES, [noise.uniform(1e-3, 2e-3) for _ in SIZES])


def test_a_link_that_lets_a_burst_pass() -> None:
    cost = MessageCost.fit(SIZES, line(-1e-5, 2e-8))
    assert cost.latency == 0.0
    assert cost.seconds_per_byte == pytest.approx(2e-8)


@pytest.mark.parametrize("times", [line(5e-3, -1e-9), [1e-3] * len(SIZES)])
def test_a_line_that_no_network_has_is_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="do not grow with their size"):
        MessageCost.fit(SIZES, times)


def test_a_fit_needs_three_sizes() -> None:
    with pytest.raises(ValueError, match="three sizes"):
        MessageCost.fit([1, 2, 2], [1.0, 2.0, 2.0])


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_messages_end_at_breaks() -> None:
    plan = merging.plan("single", list("abcd"), [1] * 4, [0.0] * 4, MessageCost(1.0, 1.0), breaks=[1])
    assert plan.messages == (1, 3)


def test_a_plan_explains_itself() -> None:
    text = str(replace(example(), measured=12.0))
    for part in ("rule exact", "3 gradients", "2 messages", "predicted 11.5 s", "measured 12 s"):
        assert part in text
    refused = MergingPlan("exact", ("a",), (4,), (0.0,), (1,), reason="the machine was busy")
    assert "default plan (the machine was busy)" in str(refused)
    assert refused.predicted is None


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    for plan in (example(), MergingPlan("exact", ("a",), (4,), (0.0,), (1,), reason="busy")):
        plan.save(tmp_path / "plan.json")
        assert MergingPlan.load(tmp_path / "plan.json") == plan
        assert MergedGradients(plan=tmp_path / "plan.json").plan == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cost": null}', '{"cost": {"a": 1}}'])
def test_a_file_that_holds_no_plan(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json holds no merging plan"):
        MergingPlan.load(tmp_path / "plan.json")


def test_a_plan_whose_parts_do_not_fit(tmp_path: Path) -> None:
    replace(example(), messages=(1, 1)).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="do not fit"):
        MergingPlan.load(tmp_path / "plan.json")


class DoubleOfTwoRanks:
    """Stands for the collectives of two ranks. The other rank takes twice as long for everything."""

    def probe(self, name: str, nbytes: int) -> Any:
        return lambda: True

    def from_rank_0(self, value: Any, name: str) -> Any:
        return value

    def gather(self, row: list[int], name: str) -> list[list[int]]:
        return [row, row if name.endswith(".check") else [2 * number for number in row]]


def times(step: float) -> StepTimes:
    """Steps of so many seconds, whose three gradients come 1, 2 and 3 s after the step has begun."""
    return StepTimes(3, [[step * n + 1.0, step * n + 2.0, step * n + 3.0, step * (n + 1)] for n in range(4)])


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> MessageCost:
    cost = MessageCost(1.0, 0.5)
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: cost))
    return cost


def refuse(*_: Any) -> MessageCost:
    raise ValueError("busy")


def planner(**options: Any) -> Planner:
    return Planner(MergedGradients(**options), [Gradient(name, "cpu", (1,), "float", 4) for name in "abc"], "name")


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_fastest_of_the_tried_plans_stays(fastest: int, cost: MessageCost) -> None:
    one, collectives = planner(warmup_steps=3, replan_every=50), DoubleOfTwoRanks()
    assert one.steps_to_next == 4
    messages = [list("abc")]
    tried = []
    one.make_plan(messages, times(9.0), collectives)
    while one.steps_to_next == 4:
        assert one.plan.messages not in tried
        tried.append(one.plan.messages)
        one.make_plan(one.plan.names(), times(4.0 if len(tried) == fastest + 1 else 5.0), collectives)
    assert (len(tried), one.steps_to_next) == (3, 50)  # two rules have made one plan
    assert one.plan.messages == tried[fastest]
    assert one.plan.measured == pytest.approx(6.0)  # the mean of the two ranks


def test_a_message_waits_for_the_slowest_rank(cost: MessageCost) -> None:
    one = planner(rule="wait_free")
    one.make_plan([list("abc")], times(9.0), DoubleOfTwoRanks())
    assert one.plan.ready == pytest.approx((0.0, 2.0, 4.0))
    assert one.steps_to_next == 1000


def test_a_fit_that_is_refused_leaves_a_plan_in_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, collectives = planner(rule="wait_free"), DoubleOfTwoRanks()
    with monkeypatch.context() as refusing:
        refusing.setattr(MessageCost, "fit", refuse)
        assert one.make_plan([list("ab"), ["c"]], times(9.0), collectives) is None
        assert (one.plan.reason, one.plan.messages) == ("busy", (2, 1))
    monkeypatch.setattr(MessageCost, "fit", classmethod(lambda cls, sizes, seconds: MessageCost(1.0, 0.5)))
    assert one.make_plan([list("ab"), ["c"]], times(9.0), collectives) == [["a"], ["b"], ["c"]]
    monkeypatch.setattr(MessageCost, "fit", refuse)
    assert one.make_plan(one.plan.names(), times(9.0), collectives) is None
    assert (one.plan.reason, one.plan.messages) == ("", (1, 1, 1))


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_plans_are_tried_where_the_fit_is_refused(fastest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need no cost."""
    monkeypatch.setattr(MessageCost, "fit", refuse)
    one, collectives = planner(warmup_steps=3, replan_every=50), DoubleOfTwoRanks()
    in_use = [list("ba"), ["c"]]
    messages = one.make_plan(in_use, times(9.0), collectives) or in_use
    for number in range(3):
        assert (one.plan.names(), one.plan.reason) == (messages, "busy" if number == 0 else "")
        messages = one.make_plan(messages, times(4.0 if number == fastest else 5.0), collectives) or messages
    assert messages == one.plan.names() == [in_use, [list("abc")], [["a"], ["b"], ["c"]]][fastest]
    assert (one.steps_to_next, one.plan.predicted) == (50, None)


def test_times_of_steps_without_gradients() -> None:
    nothing = [float("nan")] * 3
    empty = StepTimes(3, [[*nothing, 1.0], [*nothing, 3.0], [*nothing, 5.0]])
    assert (empty.steps, empty.step_seconds(), empty.around_seconds(), empty.ready()) == (2, 2.0, 0.0, [0.0] * 3)
    some = StepTimes(3, [[*nothing, 0.0], [0.1, 0.4, float("nan"), 1.0], [*nothing, 2.0]])
    assert some.ready() == pytest.approx([0.0, 0.3, 0.3])
    assert some.around_seconds() == pytest.approx(0.1)


def test_steps_are_measured_before_a_plan_is_due() -> None:
    steps = Steps(1, due=3, window=2)

    def take(number: int) -> list[tuple[bool, bool]]:
        told = []
        for _ in range(number):
            measured = steps.is_measured
            steps.record(0)
            told.append((measured, steps.end_step()))
        return told

    assert take(4) == [(True, False), (True, False), (True, True), (False, False)]
    assert (steps.first().steps, steps.last().steps) == (2, 2)
    steps.begin_plan(5)
    assert steps.last().steps == 0
    assert take(5) == [(False, False)] * 2 + [(True, False)] * 2 + [(True, True)]
    steps.begin_plan(None)
    assert take(3) == [(False, False)] * 3


# --- Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"rule": "greedy"}, ValueError, "rule must be one of"),
        ({"warmup_steps": 1}, ValueError, "2 or more"),
        ({"warmup_steps": 2.0}, ValueError, "warmup_steps must be an int"),
        ({"rule": "exact", "replan_every": 10}, ValueError, "more than warmup_steps"),
        ({"replan_every": 54}, ValueError, "replan_every must be 55 or more for the trial of all plans, not 54"),
        ({"replan_every": True}, ValueError, "replan_every must be an int"),
        ({"rule": None}, ValueError, "rule must be one of"),
        ({"warmup_steps": None}, ValueError, "warmup_steps must be an int"),
        ({"plan": 1}, ValueError, "plan must be a MergingPlan, or a file, not 1"),
        ({"plan": "/nowhere/plan.json"}, FileNotFoundError, "plan.json"),
    ],
)
def test_arguments_that_are_wrong(arguments: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        MergedGradients(**arguments)


# --- Command line -----------------------------------------------------------------------------------------------------


def run_cli(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *arguments])


def test_the_command_compares_the_rules(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    example().save(path)
    result = run_cli(path)
    assert result.exit_code == 0, result.output
    lines = {line.split()[1]: line.split() for line in result.output.splitlines() if line.startswith("│")}
    assert set(lines) == set(merging.RULES)
    assert lines["exact"][3:6:2] == ["2", "11000.00"]
    assert lines["paper"][3:6:2] == ["2", "13000.00"]
    assert lines["wait_free"][3] == "3"
    other = run_cli(path, "--latency-ms", "0", "--ns-per-byte", "1")
    assert "6000.00" in other.output


def test_the_command_draws(tmp_path: Path) -> None:
    path, picture = str(tmp_path / "plan.json"), tmp_path / "plan.png"
    example().save(path)
    assert run_cli(path, "--output", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_needs_a_cost(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    replace(example(), cost=None, reason="busy").save(path)
    result = run_cli(path)
    assert result.exit_code == 2
    assert "give --latency-ms and --ns-per-byte" in result.output
    assert run_cli(path, "--latency-ms", "1", "--ns-per-byte", "1").exit_code == 0


def test_the_command_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for name in ("text", "absent"):
        result = run_cli(str(tmp_path / name))
        assert result.exit_code == 2
        assert name in result.output
