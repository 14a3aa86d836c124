"""Metrics of a job: their names, what `horovod-partial top` makes of them, and who may read them."""

import io
import itertools
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from typer.testing import CliRunner

from horovod_partial import cli
from horovod_partial.metrics import top
from horovod_partial.metrics.job import JobMetrics
from horovod_partial.metrics.top import Scrape
from horovod_partial.settings import Settings


def rank(steps: int, seconds: float, slowness: float = 1.0, kind: str = "none", **signs: float) -> dict[str, Any]:
    known = {"steps": steps, "compute_seconds": seconds, "bytes": 4_000_000 * steps, "slowness": slowness, "kind": kind}
    return {**known, "part": "none" if kind == "none" else "loader", **signs}


def bucket(on_time: list[int], late: list[int], staleness: dict[int, int]) -> dict[str, Any]:
    return {"on_time": on_time, "late": late, "rounds": max(on_time, default=0), "staleness": staleness}


RANKS = [
    rank(100, 5.0, processors=0.5, step_seconds=50.0),
    rank(90, 9.0, 2.0, "persistent", processors=1.25, throttled=0.4, step_seconds=90.0, loader=6.0, other=0.5),
]
STATISTICS = {
    0: {
        "optimizer.0": bucket([100, 60], [0, 30], {0: 130, 1: 30}),
        "optimizer.1": bucket([90, 70], [10, 20], {0: 160}),
        "new": bucket([], [], {}),
    },
    3: {"other": bucket([5], [0], {0: 5})},
}


def text_of(ranks: list[dict[str, Any]], statistics: dict[int, dict[str, Any]]) -> str:
    registry = CollectorRegistry()
    registry.register(JobMetrics(2, lambda: ranks, lambda: statistics))
    return generate_latest(registry).decode()


def scrape(time: float = 0.0, ranks: Any = RANKS, statistics: Any = STATISTICS) -> Scrape:
    return Scrape.parse(text_of(ranks, statistics), time)


def test_names_follow_prometheus() -> None:
    text = text_of(RANKS, STATISTICS)
    kinds = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert all(name.startswith("horovod_partial_") for name in kinds)
    assert {name for name, kind in kinds.items() if kind == "counter"} == {n for n in kinds if n.endswith("_total")}
    seconds = {f"horovod_partial_{what}_seconds_total" for what in ("compute", "part", "step")}
    assert {name for name in kinds if "second" in name} == seconds


def test_each_metric_has_the_value_of_the_job() -> None:
    found = scrape()
    assert found.of("ranks") == 2
    assert found.of("steps_total", rank="1") == 90
    assert found.of("compute_seconds_total", rank="1") == 9.0
    assert found.of("step_seconds_total", rank="1") == 90.0
    assert found.of("bytes_total", rank="0") == 400e6
    assert found.of("slowness_ratio", rank="1") == 2.0
    assert found.label("slowness_ratio", "kind", rank="1") == "persistent"
    assert found.label("slowness_ratio", "part", rank="1") == "loader"
    assert found.of("part_seconds_total", rank="1", part="loader") == 6.0
    assert found.of("part_seconds_total", rank="1", part="forward") is None, "it is unknown there"
    assert found.of("throttled_ratio", rank="1") == 0.4
    assert found.of("throttled_ratio", rank="0") is None, "Linux does not tell it there"
    assert found.of("on_time_total", process_set="0", rank="0") == 190
    assert found.of("late_total", process_set="0", rank="1") == 50
    assert found.of("rounds_total", process_set="0") == 190
    assert found.of("contributions_total", process_set="0") == 320
    assert found.of("staleness_rounds_total", process_set="0") == 30
    assert found.of("rounds_total", process_set="3") == 5


def test_a_job_that_has_just_begun_has_few_metrics() -> None:
    assert set(scrape(ranks=[], statistics={}).values) == {"ranks"}
    assert scrape(ranks=[], statistics={0: {"new": bucket([], [], {})}}).of("rounds_total") == 0


def test_counters_stay_when_an_optimizer_and_its_buckets_are_forgotten() -> None:
    statistics: dict[int, dict[str, dict[str, Any]]] = {}
    job = JobMetrics(2, list, lambda: statistics)

    def rounds() -> list[float]:
        samples = {metric.name: metric.samples for metric in job.collect()}
        return [sample.value for name in ("rounds", "late") for sample in samples[f"horovod_partial_{name}"]]

    statistics[0] = {"first": bucket([10, 8], [0, 2], {}), "second": bucket([5, 5], [0, 0], {})}
    assert rounds() == [15, 0, 2]
    statistics[0] = {"second": bucket([7, 6], [0, 1], {})}
    assert rounds() == [17, 0, 3]
    statistics[0] = {"second": bucket([7, 6], [0, 1], {}), "first": bucket([1, 1], [0, 0], {})}  # a new optimizer
    assert rounds() == [18, 0, 3]
    statistics[0] = {"second": bucket([2, 2], [0, 0], {})}  # another one of this name, since the last look
    assert rounds() == [20, 0, 3]
    statistics[0] = {}
    assert rounds() == [20, 0, 3]


def printed(*frames: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(*frames, sep="\n")
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_top_shows_what_happened_between_two_scrapes() -> None:
    ranks = [
        rank(120, 6.0, processors=0.5, step_seconds=60.0),
        rank(100, 10.5, 2.0, "persistent", processors=1.25, step_seconds=100.0),
    ]
    statistics = {0: {"optimizer.0": bucket([210, 150], [10, 70], {0: 390, 1: 50})}}
    shown = printed(top.show(scrape(10.0), scrape(20.0, ranks, statistics)))
    rows = [re.split("  +", line.strip()) for line in shown.splitlines() if re.match(r" +\d", line)]
    assert rows == [
        ["1", "1.00", "150.0", "15%", "4.0", "50%", "1.2", "2.00 persistent", "loader"],
        ["0", "2.00", "50.0", "10%", "8.0", "0%", "0.5", "-", "-"],
    ]
    assert "2 ranks, 2.0 rounds/s, staleness 0.17 rounds" in shown


def test_top_shows_a_job_that_has_just_begun_or_has_begun_anew() -> None:
    assert "no step is timed yet" in printed(top.show(scrape(0.0, [], {}), scrape(1.0, [], {})))
    anew = top.show(scrape(0.0), scrape(10.0, [rank(10, 0.5), rank(20, 0.5)], {0: {}}))
    assert "-0" not in printed(anew)
    assert rates(anew) == ["1.00", "2.00"], "the new counters began with 0"


def test_top_ends_when_the_job_does() -> None:
    scrapes: Iterator[Scrape] = iter([scrape(-1001.0), scrape(-1000.0)])  # the last answer is long ago

    def read() -> Scrape:
        try:
            return next(scrapes)
        except StopIteration:
            raise ConnectionRefusedError from None

    assert len(list(top.frames(read, 1.0, lambda seconds: None))) == 1


def test_top_waits_for_a_job_that_has_not_begun() -> None:
    answers = iter([ConnectionRefusedError(), ConnectionRefusedError(), None])
    told: list[str] = []

    def read() -> Scrape:
        answer = next(answers)
        if answer:
            raise answer
        return scrape(0.0)

    top.wait(read, lambda: told.append("waiting"), lambda seconds: None)
    assert told == ["waiting"]
    assert next(answers, "all were asked for") == "all were asked for"


class JobDouble(BaseHTTPRequestHandler):
    """Answers like rank 0 of a job of two ranks."""

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text_of(RANKS, STATISTICS).encode())

    def log_message(self, *arguments: object) -> None:
        pass


def test_top_takes_an_address_or_a_url() -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), JobDouble) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        for form in ("{}", "http://{}", "http://{}/", "http://{}/metrics"):
            assert top.read(form.format(f"127.0.0.1:{server.server_address[1]}")).of("ranks") == 2
        server.shutdown()


def rates(*frames: Any) -> list[str]:
    """The steps per second that each row shows."""
    return re.findall(r"(?m)^ +\d+ +(\d+\.\d\d) ", printed(*frames))


def test_rates_are_means_over_half_a_minute() -> None:
    looks = [scrape(10.0 * n, [rank(n // 2, 0.0, step_seconds=20.0 * (n // 2))], {}) for n in range(9)]
    shown = itertools.islice(top.frames(iter(looks).__next__, 10.0, lambda seconds: None), 8)
    assert rates(*shown) == ["0.00", *["0.05"] * 7]


def test_ranks_in_lock_step_have_equal_rates_whenever_they_report() -> None:
    """Each rank reports once a second. The last report of rank 1 has not come yet when `top --once` looks again."""
    step = 0.167
    before = [rank(n, 0.1 * n, step_seconds=step * n) for n in (600, 599)]
    after = [rank(n, 0.1 * n, step_seconds=step * n) for n in (612, 605)]
    frame = top.show(scrape(100.0, before, {}), scrape(102.0, after, {}))
    assert rates(frame) == ["5.99", "5.99"]
    assert re.findall(r"\d+%", printed(frame)) == ["60%", "60%"]


def test_a_rank_that_has_stopped_has_a_rate_that_falls() -> None:
    before = scrape(60.0, [rank(590, 59.0, step_seconds=59.0)], {})
    soon, later = (scrape(time, [rank(600, 60.0, step_seconds=60.0)], {}) for time in (61.5, 71.0))
    assert [rates(top.show(before, look)) for look in (soon, later)] == [["10.00"], ["1.12"]]
    assert rates(top.show(soon, later)) == ["0.00"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["127.0.0.1:1", "--once"], "nothing answers at 127.0.0.1:1"),
        (["host.invalid:1"], "nothing answers at host.invalid:1"),
        (["worker"], "'worker' is not of the form HOST:PORT"),
        (["http://worker/metrics"], "'worker' is not of the form HOST:PORT"),
    ],
)
def test_top_refuses_what_is_no_job(arguments: list[str], told: str) -> None:
    shown = CliRunner().invoke(cli.app, ["top", *arguments])
    assert shown.exit_code == 2
    assert told in shown.output


def test_metrics_of_something_else_are_no_job() -> None:
    with pytest.raises(ValueError, match="not those of a job"):
        Scrape.parse("# TYPE up gauge\nup 1\n", 0.0)


def test_no_port_is_open_unless_asked_for_and_then_on_this_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().metrics_port == 0
    assert Settings().metrics_host == "127.0.0.1"
    assert not Settings().watches_steps
    monkeypatch.setenv("HOROVOD_PARTIAL_METRICS_PORT", "9464")
    assert Settings().watches_steps, "the metrics tell of steps"
