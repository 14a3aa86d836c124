"""Shows a running job in the terminal, rank by rank, from the metrics that its rank 0 serves."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from horovod_partial.metrics.job import PREFIX

WINDOW_SECONDS = 30.0  # shown rates are means over this time, because a step may take longer than the time of a frame
_REPORT_SECONDS = 2.0  # a rank that runs reports its steps more often than this
_PATIENCE_SECONDS = 60.0  # how long to wait for a job that answers no more, because an elastic job may restart
_BEGINS_SECONDS = 1.0  # the pause between two attempts to reach a job that has not begun
_TIMEOUT_SECONDS = 10.0  # how long to wait for an answer of rank 0


@dataclass(frozen=True)
class Scrape:
    """The metrics of a job at one time.

    `time` is in seconds of a monotonic clock. `values` has each metric's values by labels; names lack the prefix.
    """

    time: float
    values: dict[str, dict[frozenset[tuple[str, str]], float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, now: float) -> Scrape:
        """Read metrics in Prometheus's text format. Raises ValueError if the text is not that, or not of a job."""
        values: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name.removeprefix(PREFIX), {})[frozenset(sample.labels.items())] = sample.value
        if "ranks" not in values:
            raise ValueError("these metrics are not those of a job with horovod_partial")
        return cls(now, values)

    def of(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric with at least these labels. None if there is no such value."""
        wanted = set(labels.items())
        return next((value for of, value in self.values.get(name, {}).items() if wanted <= of), None)

    def label(self, name: str, wanted: str, **labels: str) -> str:
        """Return the label `wanted` of a metric with at least these labels. Empty if there is no such metric."""
        given = set(labels.items())
        return next((dict(of).get(wanted, "") for of in self.values.get(name, {}) if given <= of), "")


def read(address: str) -> Scrape:
    """Read the metrics at `HOST:PORT`, or at the URL that a browser shows for them.

    Raises ConnectionRefusedError if nobody listens there, OSError if nothing answers, and ValueError if the answer is
    not a job's, or `address` is not of this form.
    """
    address = address.removeprefix("http://").removesuffix("/").removesuffix("/metrics")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is not of the form HOST:PORT")
    # Use no proxy, because the proxy of a cluster does not reach the cluster's own hosts.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
            text = answer.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise OSError(f"the answer is not HTTP, or is cut off: {error!r}") from None
    except urllib.error.URLError as error:
        raise (error.reason if isinstance(error.reason, OSError) else error) from None
    return Scrape.parse(text, time.monotonic())


def wait(scrape: Callable[[], Scrape], tell: Callable[[], None], pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until a job listens. If no job does at first, call `tell` once.

    Raises OSError if the host is unknown, or does not answer, and ValueError if the answer is not a job's.
    """
    told = False
    while True:
        try:
            scrape()
            return
        except ConnectionRefusedError:
            if not told:
                tell()
            told = True
            pause(_BEGINS_SECONDS)


def frames(
    scrape: Callable[[], Scrape], seconds: float, pause: Callable[[float], None] = time.sleep
) -> Iterator[Group]:
    """Yield a new table every `seconds` seconds. Ends when the job has not answered for a minute.

    Raises OSError if nothing answers at first, and ValueError if the answer is not a job's.
    """
    looks = deque([scrape()])
    while True:
        pause(seconds)
        try:
            looks.append(scrape())
        except OSError:
            if time.monotonic() - looks[-1].time > _PATIENCE_SECONDS:
                return
            continue
        while len(looks) > 2 and looks[-1].time - looks[1].time >= WINDOW_SECONDS:
            looks.popleft()
        yield show(looks[0], looks[-1])


def show(before: Scrape, after: Scrape) -> Group:
    """Return a table of what the ranks did between two scrapes, slow ranks first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "steps/s", "compute ms", "computing", "MB/s", "late", "CPUs"):
        table.add_column(name, justify="right")
    table.add_column("slowness")
    table.add_column("part")
    ranks = [str(rank) for rank in range(int(after.of("ranks") or 0))]
    slowness = {rank: after.of("slowness_ratio", rank=rank) or 1.0 for rank in ranks}
    for rank, factor in sorted(slowness.items(), key=lambda item: -item[1]):
        seconds = _seconds(before, after, rank)
        steps, computing, moved = (
            grown / seconds if (grown := _grown(before, after, name, rank=rank)) is not None else None
            for name in ("steps_total", "compute_seconds_total", "bytes_total")
        )
        table.add_row(
            rank,
            _text(steps, "{:.2f}"),
            _text(1e3 * computing / steps if steps and computing is not None else None, "{:.1f}"),
            _text(computing, "{:.0%}"),
            _text(moved / 1e6 if moved is not None else None, "{:.1f}"),
            _text(_late(before, after, rank), "{:.0%}"),
            _text(after.of("processors", rank=rank), "{:.1f}"),
            f"{factor:.2f} {after.label('slowness_ratio', 'kind', rank=rank)}" if factor > 1 else "-",
            after.label("slowness_ratio", "part", rank=rank).replace("none", "") or "-",
            style="bold" if factor > 1 else None,
        )
    return Group(Text(_summary(before, after, ranks)), table)


def _summary(before: Scrape, after: Scrape, ranks: list[str]) -> str:
    lines = [f"{len(ranks)} ranks"]
    rounds = _grown(before, after, "rounds_total", process_set="0")
    contributions = _grown(before, after, "contributions_total", process_set="0")
    stale = _grown(before, after, "staleness_rounds_total", process_set="0")
    if rounds:
        lines.append(f"{rounds / (after.time - before.time):.1f} rounds/s")
    if contributions and stale is not None:
        lines.append(f"staleness {stale / contributions:.2f} rounds")
    if after.of("steps_total") is None:
        lines.append("no step is timed yet")
    return ", ".join(lines)


def _late(before: Scrape, after: Scrape, rank: str) -> float | None:
    late = _grown(before, after, "late_total", process_set="0", rank=rank)
    on_time = _grown(before, after, "on_time_total", process_set="0", rank=rank)
    return late / (late + on_time) if late is not None and on_time is not None and late + on_time else None


def _seconds(before: Scrape, after: Scrape, rank: str) -> float:
    """Return how long a rank took for the steps that it has reported between two scrapes, in seconds.

    The time between the scrapes would not do: ranks report at different moments, so even of ranks in lock-step one may
    have reported once more than another. A rank that has stopped reports nothing, and then the time goes on.
    """
    between = after.time - before.time
    steps = _grown(before, after, "steps_total", rank=rank)
    took = _grown(before, after, "step_seconds_total", rank=rank)
    return max(took, between - _REPORT_SECONDS - took / steps) if steps and took else between


def _grown(before: Scrape, after: Scrape, name: str, **labels: str) -> float | None:
    """Return by how much a counter has grown. One that became smaller began at 0 again: the elastic job restarted."""
    now, then = after.of(name, **labels), before.of(name, **labels)
    if now is None:
        return None
    return now - then if then is not None and now >= then else now


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
