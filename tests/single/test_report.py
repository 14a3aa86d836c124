"""Reports of recorded jobs: who is slow, and where the time went; as text and page."""

import base64
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_recordings as synthetic
from numpy.typing import NDArray
from synthetic_recordings import Host, Job
from typer.testing import CliRunner

from horovod_partial import cli
from horovod_partial.insight import recording
from horovod_partial.insight.report import Summary, comparison

RANKS = 8
AFTER = "20261124T080000.000000Z"  # the name of a later run


# --- Summaries --------------------------------------------------------------------------------------------------------

HOSTS = [Host("worker-0"), Host("worker-1", offset=-2.5, drift=40e-6)]


def compute_times() -> NDArray[np.float64]:
    """Rank 1 is slow in bursts, 3 always, 6 at random."""
    compute = synthetic.even(240, RANKS, noise=0.03, seed=1)
    for begin in range(20, 240, 60):
        compute[begin : begin + 15, 1] *= 1.8
    compute[:, 3] *= 1.6
    compute[np.random.default_rng(5).random(240) < 0.15, 6] *= 2.0
    return compute


@pytest.fixture(scope="module", params=[None, 5], ids=["full", "quorum"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording."""
    folder: Path = tmp_path_factory.mktemp("recordings")
    synthetic.write(folder, Job(compute_times(), request.param, hosts=HOSTS, late_ends=0.05))
    return folder


@pytest.fixture(scope="module")
def summary(run: Path) -> Summary:
    return Summary.of(recording.load(run))


def test_slow_ranks_are_found_in_recordings(summary: Summary) -> None:
    kinds = "none bursts none persistent none none random none"
    assert [rank.slowness.worst.kind if rank.slowness.worst else "none" for rank in summary.ranks] == kinds.split()
    takes = r"takes {} times \(95 %: \S+ to \S+\) as long as the median rank, in \d+ of \d+ steps since step \d+"
    assert re.fullmatch(
        f"Rank 3 {takes}; rank 1 {takes}, in bursts of 15 steps every 60; rank 6 {takes}, at random\\.".format(
            r"1\.6\d", r"1\.[78]\d", r"[12]\.\d+"
        ),
        summary.answer,
    )


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of a job. In the second one rank 3 has been mended, rank 0 is slow, and ranks are fewer."""
    folder: Path = tmp_path_factory.mktemp("two_runs")
    synthetic.write(folder, Job(compute_times()))
    after = compute_times()[:200, :6]
    after[:, 3] /= 1.6
    after[:, 0] *= 1.5
    synthetic.write(folder, Job(after, 5, run=AFTER))
    return folder


@pytest.fixture(scope="module")
def both(two_runs: Path) -> comparison.Runs:
    return comparison.labelled([Summary.of(recording.load(two_runs, run)) for run in (synthetic.RUN, AFTER)])


def test_what_has_changed_comes_first(both: comparison.Runs) -> None:
    first, *each = comparison.sentences(both)
    told = re.fullmatch(
        r"After: (a step takes (\S+) ms in place of (\S+) \((\S+) times faster\)); each rank waits for (\S+)% of the time "
        r"in place of (\S+)%; rank 3 is no longer slow; rank 1 is still slow \(bursts\); rank 0 is slow now "
        r"\(persistent\); rank 6 is not in this run, and slow before; 6 ranks in place of 8; policy quorum:5 in place of full\.",
        first,
    )
    assert told, first
    assert comparison.headline(both) == told[1].capitalize()
    after, before, times, waits_after, waits_before = map(float, told.groups()[1:])
    for milliseconds, of in ((after, both["after"]), (before, both["before"])):
        parts = [rank.steps.compute + rank.steps.wait + rank.steps.reduce for rank in of.ranks]
        assert milliseconds == pytest.approx(1e3 * np.mean(parts), abs=0.06)
    assert times == pytest.approx(before / after, abs=0.01)
    for share, of in ((waits_after, both["after"]), (waits_before, both["before"])):
        waited = np.mean([rank.steps.wait.sum() for rank in of.ranks])
        lasted = np.mean([rank.steps.result[-1] - rank.steps.begin[0] for rank in of.ranks])
        assert share == pytest.approx(100 * waited / lasted, abs=0.51)
    assert each[:2] == [f"Before: {both['before'].answer}", f"Before: {both['before'].waiting}"]
    assert each[2:] == [f"After: {both['after'].answer}", f"After: {both['after'].waiting}"]


def test_what_has_not_changed_is_told(both: comparison.Runs) -> None:
    of = both["before"]
    first = comparison.sentences(comparison.labelled([of, of]))[0]
    step, waits = (
        f"a step takes {1e3 * of.step_seconds:.1f} ms",
        f"each rank waits for {of.waited_share:.0%} of the time",
    )
    still = "ranks 3, 1 and 6 are still slow (persistent, bursts, random)"
    assert first == f"After: {step}, as before; {waits}, as before; {still}."
    slower = comparison.sentences(comparison.labelled([both["after"], of]))[0]
    assert re.search(r"ms in place of \S+ \(\S+ times slower\)", slower)
    assert "rank 0 is no longer slow" in slower


def test_a_rank_that_is_missing_is_not_called_mended(tmp_path: Path) -> None:
    slow = synthetic.even(100, 4)
    slow[:, 3] *= 1.5
    for name, compute in (("all", slow), ("three", slow[:, :3])):
        synthetic.write(tmp_path / name, Job(compute))
    of = [Summary.of(recording.load(tmp_path / name)) for name in ("all", "three")]
    told = comparison.sentences(comparison.labelled(of))[0]
    assert "; no rank is slow; rank 3 is not in this run, and slow before; " in told
    assert "; rank 3 is slow (persistent); " in comparison.sentences(comparison.labelled(of[::-1]))[0]


@pytest.mark.parametrize(
    ("steps", "starved", "told"),
    [
        (100, 0.1, "no rank is slow any more."),
        (10, 0.1, "too few steps to tell which rank is slow."),
        (100, 0.8, "the machine was too loaded to tell which rank is slow."),
    ],
)
def test_a_rank_is_called_mended_only_if_that_can_be_told(
    tmp_path: Path, steps: int, starved: float, told: str
) -> None:
    slow = synthetic.even(100, 4)
    slow[:, 2] *= 1.5
    synthetic.write(tmp_path, Job(slow))
    synthetic.write(tmp_path, Job(synthetic.even(steps, 4), run=AFTER, hosts=[Host("worker-0", starved=starved)]))
    runs = [Summary.of(recording.load(tmp_path, run)) for run in (synthetic.RUN, AFTER)]
    assert comparison.sentences(comparison.labelled(runs))[0].endswith(f"; {told}")


def test_waiting_is_set_against_full(summary: Summary) -> None:
    compute = compute_times()[1:]
    full = (compute.max(axis=1) - compute.mean(axis=1)).sum()
    assert summary.waited_under_full.sum() == pytest.approx(full, rel=1e-3)
    if summary.steps.rounds:
        assert summary.waited.sum() < 0.3 * full
        assert f"would have made it wait for {full:.1f} s" in summary.waiting
    else:
        assert summary.waited.sum() == pytest.approx(full, rel=0.01)
        assert summary.waiting.endswith("A policy that waits for nobody saves that at most.")


def test_who_made_the_micro_batches(tmp_path: Path) -> None:
    compute = synthetic.even(60, 4, seed=1)
    compute[:, 3] *= 3
    folder = synthetic.write(tmp_path, Job(compute, passes=4))
    summary = Summary.of(recording.load(tmp_path))
    assert summary.steps.passes == 4
    told = r"Rank 3 takes 3\.0 times \(95 %: \S+ to \S+\) as long as the median rank, in (\d+) of \1 steps"
    assert re.match(told, summary.answer)
    made = summary.steps.micro_batches
    for rank, micro_batches in made.items():
        lines = map(json.loads, (folder / f"rank-{rank}.0.jsonl").read_text().splitlines())
        assert micro_batches == sum(len(line["step"]) for line in lines if line.get("table") == "steps")
    assert sum(made.values()) == 60 * 16
    assert made[3] < 0.5 * made[0]
    full = (compute[1:].max(axis=1) - compute[1:].mean(axis=1)).sum()
    assert summary.waited_under_full.sum() == pytest.approx(full, rel=0.02)
    assert summary.waited.sum() < 0.4 * full
    shown = CliRunner().invoke(cli.app, ["report", str(tmp_path)])
    assert "micro-batches" in shown.output
    assert f"{made[0]} ({made[0] / (60 * 16):.0%})" in shown.output


def test_the_part_that_explains_slowness_is_told(tmp_path: Path) -> None:
    from horovod_partial.insight.report import figures

    compute = synthetic.even(100, 4, noise=0.01)
    loader = 0.1 * compute
    loader[40:, 2] += 0.06
    compute[40:, 2] += 0.06
    synthetic.write(tmp_path, Job(compute, loader=loader))
    summary = Summary.of(recording.load(tmp_path))
    told = r"Rank 2 takes 1\.6\d times .* in \d+ of \d+ steps since step (39|40): 100 % of the excess is waiting for data\."
    assert re.fullmatch(told, summary.answer), summary.answer
    assert [rank.slowness.cause[0] for rank in summary.ranks] == ["none", "none", "loader", "none"]
    bars = {bar.name: bar.x[2] for bar in figures.plots(comparison.labelled([summary]))[2].figure.data}
    assert list(bars) == ["loader", "forward", "backward", "wait for others", "reduction"]
    assert bars["loader"] == pytest.approx(1e3 * loader[1:, 2].mean(), abs=1e-3)


def test_a_single_delay_counts_once(tmp_path: Path) -> None:
    """A rank that is late once makes fewer micro-batches; those that it does not make would have been as short as usual."""
    compute = synthetic.even(40, 4, noise=0.0)
    synthetic.write(tmp_path, Job(compute, passes=4, first=np.eye(40, 4)[np.arange(40) % 4] * 0.05))
    steps = Summary.of(recording.load(tmp_path)).steps
    assert {rank.micro_batches.min() for rank in steps.ranks} == {2}
    late = np.arange(1, 40)[:, None] % 4 == np.arange(4)
    assert steps.compute[late] == pytest.approx(0.15, rel=0.01)
    assert steps.compute[~late] == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("passes", [1, 4])
def test_another_optimizer_does_not_join_the_updates(tmp_path: Path, passes: int) -> None:
    """The training goes on with a new optimizer, whose rounds begin with 0 again."""
    compute = synthetic.even(60, 4, seed=1)
    compute[:, 3] *= 2
    folder = synthetic.write(tmp_path, Job(compute, passes=passes))
    first = Summary.of(recording.load(tmp_path))
    for rank in range(4):
        file = folder / f"rank-{rank}.0.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        last = next(line["time"][0] for line in lines if line.get("table") == "end")
        later = [dict(line) for line in lines if line.get("table") in ("buckets", "steps")][:2]
        for line in later:
            for column in set(line) - {"table"}:
                line[column] = line[column][:10]
            line["bucket"] = [number + 2 for number in line["bucket"]]
            for column in set(line) & {"begin", "handed", "result"}:
                line[column] = [time + last for time in line[column]]
            if "name" in line:
                line["name"] = [name.replace("optimizer", "second") for name in line["name"]]
        file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *later]))
    both = Summary.of(recording.load(tmp_path))
    assert both.shares_work
    assert both.steps.micro_batches == first.steps.micro_batches
    for rank, before in zip(both.ranks, first.ranks, strict=True):
        assert rank.steps.compute.mean() == pytest.approx(before.steps.compute.mean())


def test_time_goes_to_compute_wait_and_reductions(summary: Summary) -> None:
    for steps, rank in zip(summary.steps.ranks, summary.ranks, strict=True):
        step = np.mean(steps.result - steps.begin)
        assert rank.slowness.compute + rank.steps.wait.mean() + rank.steps.reduce.mean() == pytest.approx(step)
        assert rank.steps.late.any() == summary.steps.rounds


def answer(tmp_path: Path, compute: NDArray[np.float64]) -> str:
    synthetic.write(tmp_path, Job(compute))
    return Summary.of(recording.load(tmp_path)).answer


def test_a_job_without_a_slow_rank(tmp_path: Path) -> None:
    assert re.fullmatch(
        r"No rank is slow: the slowest, rank \d, takes 1\.0\d times as long as the fastest\.",
        answer(tmp_path, synthetic.even(100, 4)),
    )


def test_a_job_of_few_steps(tmp_path: Path) -> None:
    told = "9 steps are too few to tell which rank is slow: record 30 or more."
    assert answer(tmp_path, synthetic.even(10, 4)) == told


def test_machines_that_were_too_loaded_to_tell(tmp_path: Path) -> None:
    loaded = [Host("worker-0", starved=0.9), Host("worker-1", starved=0.8)]
    told = "Each rank waited for a processor for 80% of the time in its steps or more, so compute times are uncertain:"
    synthetic.write(tmp_path / "even", Job(synthetic.even(100, 4), hosts=loaded))
    even = Summary.of(recording.load(tmp_path / "even"))
    assert even.headline == "The machine was too loaded to tell which rank is slow"
    assert even.answer.startswith(f"{even.headline}. {told}")
    compute = synthetic.even(100, 4)
    compute[:, 2] *= 1.5
    synthetic.write(tmp_path / "slow", Job(compute, hosts=loaded))
    slow = Summary.of(recording.load(tmp_path / "slow"))
    assert slow.headline == "Rank 2 is slow"
    assert f" {told}" in slow.answer


@pytest.mark.parametrize("starved", [0.8, 0.3])
def test_a_rank_that_is_starved_where_others_are_not(tmp_path: Path, starved: float) -> None:
    hosts = [*map(Host, "abc"), Host("d", starved=starved)]
    even, compute = synthetic.even(100, 8), synthetic.even(100, 8)
    compute[:, [3, 7]] *= 1.5
    synthetic.write(tmp_path / "one", Job(compute[:, :4], hosts=hosts))
    told = f"Rank 3 is starved: it waits for a processor for {starved:.0%} of the time in its steps, and no other rank for more than 10%."
    one = Summary.of(recording.load(tmp_path / "one"))
    assert f" {told} Give such ranks processors of their own" in one.answer
    synthetic.write(tmp_path / "two", Job(compute, hosts=hosts))
    told = f"Ranks 3, 7 are starved: each waits for a processor for at least {starved:.0%} of the time in its steps, and no other"
    assert told in Summary.of(recording.load(tmp_path / "two")).answer
    synthetic.write(tmp_path / "even", Job(even, hosts=hosts))
    assert "starved" not in Summary.of(recording.load(tmp_path / "even")).answer


@pytest.mark.parametrize(("others", "one"), [(0.1, 0.24), (0.2, 0.38), (0.45, 0.24)])
def test_ranks_that_wait_alike_are_not_starved(tmp_path: Path, others: float, one: float) -> None:
    hosts = [*(Host(name, starved=others) for name in "abc"), Host("d", starved=one)]
    compute = synthetic.even(100, 4)
    compute[:, 3] *= 1.5
    synthetic.write(tmp_path, Job(compute, hosts=hosts))
    assert "starved" not in Summary.of(recording.load(tmp_path)).answer


def test_a_job_with_many_slow_ranks(tmp_path: Path) -> None:
    compute = synthetic.even(100, 12)
    compute[:, :5] *= 1.5
    assert answer(tmp_path, compute).endswith("; 2 more are slow.")
    assert re.fullmatch(r"Ranks \d, \d, \d and 2 more are slow", Summary.of(recording.load(tmp_path)).headline)


def test_a_job_with_fewer_pauses_than_tell(tmp_path: Path) -> None:
    compute = synthetic.even(300, 4, 0.04)
    compute[49:250:50, 1] += 2.0
    told = r"The others waited for rank 1 for 4\d% of the compute time, mostly in 5 of 2\d\d steps\. These are too few to tell"
    assert re.search(told, answer(tmp_path / "one", compute))
    assert Summary.of(recording.load(tmp_path / "one")).headline == "Too few long steps to tell which rank is slow"
    compute[24:250:50, 2] += 2.0
    compute[12:250:50, 3] += 2.0
    assert "waited for rank" not in answer(tmp_path / "three alike", compute)
    assert "waited for rank" not in answer(tmp_path / "even", synthetic.even(300, 4))


def test_a_job_with_pauses(tmp_path: Path) -> None:
    compute = synthetic.even(1200, RANKS, 0.04)
    compute[49::50, 1] += 5.0
    told = r"Rank 1 pauses for 5\.\d s every 50 steps: the others wait for it for 7\d % of the time, since step 4\d."
    assert re.fullmatch(told, answer(tmp_path / "one", compute))
    assert Summary.of(recording.load(tmp_path / "one")).headline == "Rank 1 is pausing"
    compute[24::50, 2] += 5.0
    synthetic.write(tmp_path / "two", Job(compute))
    assert re.fullmatch("Ranks [12] and [12] are pausing", Summary.of(recording.load(tmp_path / "two")).headline)
    compute[:, 3] *= 3.0
    synthetic.write(tmp_path / "both", Job(compute))
    assert re.fullmatch("Ranks [12], [12] and 3 are slow", Summary.of(recording.load(tmp_path / "both")).headline)


@pytest.mark.parametrize(
    ("links", "carried", "named"),
    [
        ((100, 100, 100, 100), 1.5, []),
        ((100, 100, 10, 100), 1.5, ["worker-2"]),
        ((100, 100, 30, 100), 1.5, []),  # the difference is too small
        ((100, 10, 10, 100, 100, 100), 1.5, ["worker-1", "worker-2"]),
        ((100, 100, 10, 100), 0.05, []),  # the gradients must have gone over something else
        ((100, 100, 10), 1.5, ["worker-2"]),
        ((100, 10), 1.5, []),  # both have the one connection
    ],
)
def test_hosts_with_a_slow_link_are_named(
    tmp_path: Path, links: tuple[float, ...], carried: float, named: list[str]
) -> None:
    hosts = [Host(f"worker-{number}", link=link) for number, link in enumerate(links)]
    synthetic.write(tmp_path, Job(synthetic.even(40, 2 * len(hosts)), hosts=hosts, carried=carried))
    told = [
        f"The link of host {host} is slow: its connections carry 10 MB/s, and those of other hosts 100 MB/s. "
        for host in named
    ]
    assert Summary.of(recording.load(tmp_path)).waiting.startswith("".join(told) + "Each rank waited for ")


def test_ranks_without_a_common_step_are_refused(tmp_path: Path) -> None:
    path = synthetic.write(tmp_path, Job(synthetic.even(100, 2), segments=4))
    for file in ("rank-0.0.jsonl", "rank-0.1.jsonl", "rank-1.2.jsonl", "rank-1.3.jsonl"):
        (path / file).unlink()
    with pytest.raises(ValueError, match="no step that all ranks have recorded"):
        Summary.of(recording.load(tmp_path))


# --- The command ------------------------------------------------------------------------------------------------------


def report(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["report", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_shows_a_table_and_writes_a_page(run: Path, summary: Summary, tmp_path: Path) -> None:
    status, output = report(run, "--output", tmp_path / "page.html")
    assert status == 0
    assert output.splitlines()[:2] == [summary.answer, summary.waiting]
    assert f"{RANKS} ranks, 239 steps, policy {summary.steps.policy}" in output
    assert "worker-1: " in output
    header, *rows = (re.split(" *[│┃] *", line)[1:-1] for line in output.splitlines() if line[:1] in ("│", "┃"))
    table = {row["rank"]: row for row in (dict(zip(header, cells, strict=True)) for cells in rows)}
    for rank in summary.ranks:
        row, steps = table[str(rank.rank)], rank.steps
        for column, seconds in (("compute ms", steps.compute), ("wait ms", steps.wait), ("reduce ms", steps.reduce)):
            assert row[column] == f"{1e3 * seconds.mean():.1f}"
        assert (row["late"], row["staleness"]) == (f"{steps.late.mean():.0%}", f"{steps.staleness.mean():.2f}")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert report(run, "--run", synthetic.RUN)[0] == 0


def test_the_command_compares_two_runs(two_runs: Path, both: comparison.Runs, tmp_path: Path) -> None:
    status, output = report(two_runs / synthetic.RUN, two_runs / AFTER, "--output", tmp_path / "page.html")
    assert status == 0
    lines = output.splitlines()
    assert lines[:5] == comparison.sentences(both)
    assert [line.rstrip() for line in lines[5:7]] == [
        f"{label.capitalize()}: {run.title}" for label, run in both.items()
    ]
    rows = [re.split(r" *│ *", line)[1:-1] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows[:6]] == [str(rank.rank) for rank in both["after"].slowest_first]
    assert {row[0] for row in rows[6:]} == {"6", "7"}
    cells = {row[0]: row[1:] for row in rows}
    assert re.fullmatch(r"1\.6\d persistent", cells["3"][0])
    assert cells["3"][1] == "-"
    assert re.fullmatch(r"1\.[78]\d bursts", cells["1"][1])
    assert cells["7"][1::2] == ["-", "-", "-"], "the second run has no rank 7"
    assert cells["3"][2:4] == [f"{1e3 * run.ranks[3].steps.compute.mean():.1f}" for run in both.values()]
    assert report(two_runs, "--run", synthetic.RUN, "--run", AFTER) == (0, output)
    assert f"<h1>{comparison.headline(both)}</h1>" in (tmp_path / "page.html").read_text()


def test_the_command_shows_two_runs_at_most(run: Path) -> None:
    told = "a report shows one run or two: give --run once for each of them, or name their folders\n"
    for arguments in ([run, run, run], [run, run, "--run", synthetic.RUN], [run, *["--run", synthetic.RUN] * 3]):
        assert report(*arguments) == (2, told)


def test_the_command_refuses_what_it_cannot_read(run: Path, tmp_path: Path) -> None:
    told = "holds no recording: no file of it or of a folder in it is named rank-RANK.SEGMENT.jsonl"
    assert report(tmp_path) == (2, f"{tmp_path} {told}\n")
    assert report(run, "--run", "other")[0] == 2
    status, output = report(run, "--output", tmp_path / "nowhere" / "page.html")
    assert (status, "nowhere" in output) == (2, True)


def test_a_page_needs_plotly(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("horovod_partial.insight.report.page", raising=False)
    monkeypatch.setitem(sys.modules, "horovod_partial.insight.report.page", None)
    status, output = report(run, "--output", tmp_path / "page.html")
    assert (status, output) == (2, "--output needs plotly: run `pip install horovod-partial[report]`\n")


# --- The page ---------------------------------------------------------------------------------------------------------

TITLES = {
    False: ["Compute time of each rank", "Compute time of the slow ranks", "What a step's time went to", "Waiting"],
    True: [
        *("Compute time of each rank", "Compute time of the slow ranks", "What a step's time went to"),
        *("Waiting, against Full()", "Late steps", "Staleness", "Rounds, and the quorum"),
    ],
}


@pytest.fixture(scope="module")
def page(summary: Summary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from horovod_partial.insight.report import page

    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    page.write(comparison.labelled([summary]), path)
    return path


@pytest.fixture(scope="module")
def page_of_two(both: comparison.Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from horovod_partial.insight.report import page

    path: Path = tmp_path_factory.mktemp("page") / "both.html"
    page.write(both, path)
    return path


def embedded(html: str, number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The traces and the layout of a plot in the page."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', html, re.DOTALL)
    assert found
    figure = json.loads(found[1])[number]
    return figure["data"], figure["layout"]


def values(column: Any) -> NDArray[Any]:
    """Data of a trace."""
    if not isinstance(column, dict):
        return np.array(column)
    data = np.frombuffer(base64.b64decode(column["bdata"]), dtype=column["dtype"])
    return data.reshape([int(size) for size in column["shape"].split(",")]) if "shape" in column else data


def test_each_plot_has_data_a_title_axes_and_a_reading(page: Path, summary: Summary) -> None:
    html = page.read_text()
    sections = re.findall(r'<section>\n<h2>(.*?)</h2>\n<p>(.*?)</p>\n<div class="plot"', html)
    assert [title.replace("&#x27;", "'") for title, _ in sections] == TITLES[summary.steps.rounds]
    assert all(len(reading) > 60 and reading.endswith(".") for _, reading in sections)
    for number in range(len(sections)):
        traces, layout = embedded(html, number)
        assert layout["xaxis"]["title"]["text"]
        for plotted in traces:
            numbers = values(plotted.get("z", plotted["x"] if plotted["type"] == "bar" else plotted["y"]))
            assert numbers.size > 1 or plotted["name"] == "closed by first"
            assert np.isfinite(numbers).all()
    heat = values(embedded(html, 0)[0][0]["z"])
    assert heat.shape == (RANKS, 239)
    assert np.median(heat[3]) == pytest.approx(1.6, rel=0.05)
    parts = {plotted["name"]: values(plotted["x"]) for plotted in embedded(html, 2)[0]}
    assert parts["compute"] == pytest.approx([1e3 * rank.slowness.compute for rank in summary.ranks])
    assert parts["wait for others"] == pytest.approx([1e3 * rank.steps.wait.mean() for rank in summary.ranks])
    assert parts["reduction"] == pytest.approx([1e3 * rank.steps.reduce.mean() for rank in summary.ranks])


def brightness(colour: str) -> int:
    """Of a colour as #RRGGBB."""
    return sum(bytes.fromhex(colour[1:]))


def test_darker_is_more_and_a_row_is_its_rank(page: Path, summary: Summary) -> None:
    maps = {0: [rank.steps.compute for rank in summary.ranks]}
    if summary.steps.rounds:
        maps |= {
            4: [100 * rank.steps.late for rank in summary.ranks],
            5: [rank.steps.staleness for rank in summary.ranks],
        }
    for number, of_ranks in maps.items():
        (heat,), layout = embedded(page.read_text(), number)
        of_colours = [brightness(colour) for _, colour in heat["colorscale"]]
        assert of_colours == sorted(of_colours, reverse=True)
        assert heat["zmin"] < heat["zmax"]
        assert not heat.get("reversescale")
        assert list(heat["y"]) == [f"rank {rank}" for rank in range(RANKS)]
        assert layout["yaxis"]["autorange"] == "reversed", "rank 0 is at the top"
        means = np.mean(of_ranks, axis=1)
        scale = min(means) if number == 0 else 1.0
        edges = np.r_[values(heat["x"])]
        assert np.average(values(heat["z"]), axis=1, weights=np.diff(edges)) == pytest.approx(means / scale, rel=1e-4)


def test_curves_and_dots_are_those_of_what_they_name(page: Path, summary: Summary) -> None:
    html = page.read_text()
    curves = {plotted["name"]: values(plotted["y"]) for plotted in embedded(html, 1)[0]}
    assert list(curves) == ["median of all ranks", *(f"rank {rank.rank}" for rank in summary.slow)]
    for rank in summary.slow:
        assert curves[f"rank {rank.rank}"] == pytest.approx(1e3 * rank.steps.share)
    if summary.steps.rounds:
        dots = {plotted["name"]: plotted for plotted in embedded(html, 6)[0]}
        of_first, of_quorum = (values(dots[f"closed by {reason}"]["y"]) for reason in ("first", "quorum"))
        assert of_first.tolist() == [RANKS]
        assert 5 <= of_quorum.min() < RANKS
        assert set(values(dots["quorum"]["y"])[1:]) == {5}


def test_the_text_and_the_map_count_steps_alike(page: Path, summary: Summary) -> None:
    heat = embedded(page.read_text(), 0)[0][0]
    dark = np.flatnonzero(values(heat["z"])[1] > 1.5)
    worst = summary.ranks[1].slowness.worst
    assert worst
    assert values(heat["x"])[dark[0]] == worst.begin == 19, "the first step has no begin, so it is not counted"


def test_two_runs_have_the_same_scales(page_of_two: Path, both: comparison.Runs) -> None:
    html = page_of_two.read_text()
    (heat,), _ = embedded(html, 0)
    times = values(heat["z"])
    assert times.shape == (8 + 6, 239)
    assert list(heat["y"]) == [f"rank {n}, before" for n in range(8)] + [f"rank {n}, after" for n in range(6)]
    assert np.isnan(times[8:, 199:]).all(), "the second run has ended"
    normal = min(rank.slowness.compute for run in both.values() for rank in run.ranks)
    assert np.nanmean(times[8 + 2]) == pytest.approx(both["after"].ranks[2].slowness.compute / normal, rel=1e-3)
    lines = {plotted["name"]: plotted["line"] for plotted in embedded(html, 1)[0]}
    assert lines["rank 1, before"]["color"] == lines["rank 1, after"]["color"]
    assert lines["rank 1, before"]["dash"] != lines["rank 1, after"]["dash"]
    bars = embedded(html, 2)[0]
    runs_of_ranks = [*((n, label) for n in range(6) for label in both), (6, "before"), (7, "before")]
    assert all(list(bar["y"]) == [f"rank {n}, {label}" for n, label in runs_of_ranks] for bar in bars)
    waited = {plotted["name"]: values(plotted["y"])[-1] for plotted in embedded(html, 3)[0]}
    assert waited["recorded, full, before"] == pytest.approx(both["before"].waited.sum())
    assert waited["recorded, quorum:5, after"] == pytest.approx(both["after"].waited.sum())
    assert "under Full(), computed, before" not in waited, "that is what was recorded"
    assert html.count('<tr class="slow">') == 4


def test_the_page_has_the_answer_and_needs_no_network(page: Path, summary: Summary) -> None:
    html = page.read_text()
    assert f"<h1>{summary.headline}</h1>" in html
    assert f"<p>{summary.answer}</p>" in html
    assert html.count('<tr class="slow">') == 3
    assert len(html) < 2.5e6
    assert not re.search(r"""<(script|link|img)[^>]*(src|href)=["']?(https?:)?//""", html)


def browser_path() -> str | None:
    """A Chromium on the PATH; None leaves it to playwright, which may have its own."""
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    return next((path for path in found if path), None)


FILL = "of => getComputedStyle(of).fill"


def is_light(colour: str) -> bool:
    """Whether a colour, as `rgb(R, G, B)`, is nearer to white than to black."""
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) > 3 * 128


# Its plots are all that there are.
@pytest.mark.parametrize("run", [5], ids=["quorum"], indirect=True)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("of", ["page", "page_of_two"])
def test_a_browser_draws_each_plot(request: pytest.FixtureRequest, run: Path, of: str, width: int, scheme: Any) -> None:
    page: Path = request.getfixturevalue(of)
    titles = [*TITLES[True][:-1], TITLES[True][-1] + (", after" if of == "page_of_two" else "")]
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as tools:
        path = browser_path()
        if path is None and not Path(tools.chromium.executable_path).exists():
            pytest.skip("no browser: neither a Chromium on the PATH, nor one of `playwright install chromium`")
        with tools.chromium.launch(executable_path=path, args=["--no-sandbox"]) as browser:
            size = {"width": width, "height": 900}
            view = browser.new_context(offline=True, viewport=size, color_scheme=scheme).new_page()
            wrong: list[str] = []
            view.on("pageerror", lambda error: wrong.append(str(error)))
            view.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
            view.goto(page.as_uri())
            view.wait_for_function(f"document.querySelectorAll('.plot .main-svg .xtitle').length >= {len(titles)}")
            for number, title in enumerate(titles):
                plot = view.locator(".plot").nth(number)
                box = plot.locator("svg.main-svg").first.bounding_box()
                assert box["width"] > 0.75 * width, title
                assert box["height"] > 200, title
                marks = "path.js-line, path.point, .points path, .heatmaplayer image"
                assert plot.locator(marks).count() > 0, f"{title}: nothing is drawn"
                assert is_light(plot.locator(".xtitle").evaluate(FILL)) == (scheme == "dark"), title
                for bar in plot.locator(".infolayer .colorbar").all():
                    inside = bar.bounding_box()
                    assert box["x"] <= inside["x"], title
                    assert inside["x"] + inside["width"] <= box["x"] + box["width"], title
            background = view.locator("body").evaluate("of => getComputedStyle(of).backgroundColor")
            assert is_light(background) == (scheme == "light")
            assert view.locator("#ranks tbody tr").count() == RANKS
            assert view.locator(".modebar").count() == 0, "a toolbar would cover the colour bars"
            assert view.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert wrong == []
