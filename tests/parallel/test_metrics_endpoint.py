"""The metrics of running jobs, read over HTTP: by our reader, and by a real Prometheus."""

import http
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.whole_jobs import PATIENCE_SECONDS, Job

from horovod_partial.metrics import top

pytestmark = pytest.mark.launch(ranks=(3,))
GRAFANA = Path(__file__).resolve().parents[2] / "examples" / "grafana"
HEARTBEATS = "3"  # seconds, in which each rank gives ten


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def start(job: Job, port: int, policy: str) -> None:
    """Start a job that trains for ever, with its last rank slow."""
    variables = {"HOROVOD_PARTIAL_METRICS_PORT": str(port), "HOROVOD_PARTIAL_STALL_SECONDS": HEARTBEATS}
    job.start("recorded", policy, "0", "for_ever", **variables)


def read(port: int) -> top.Scrape | None:
    try:
        return top.read(f"127.0.0.1:{port}")
    except OSError:  # the job has not begun
        return None


def slow_ranks(scrape: top.Scrape | None) -> list[int]:
    if scrape is None:
        return []
    ranks = range(int(scrape.of("ranks") or 0))
    return [rank for rank in ranks if (scrape.of("slowness_ratio", rank=str(rank)) or 1.0) > 1]


@pytest.mark.full_matrix("mpi")
@pytest.mark.parametrize("policy", ["majority", pytest.param("full", marks=pytest.mark.full_matrix)])
def test_a_job_tells_who_is_slow_while_ranks_are_stopped_and_killed(job: Job, port: int, policy: str) -> None:
    start(job, port, policy)
    job.until(lambda: slow_ranks(read(port)) == [2], "the metrics name rank 2")
    first = read(port)
    assert first is not None
    assert min(first.of("steps_total", rank=str(rank)) or 0 for rank in range(3)) > 0
    assert min(first.of("bytes_total", rank=str(rank)) or 0 for rank in range(3)) > 0
    if policy == "majority":
        assert (first.of("late_total", rank="2") or 0) > (first.of("late_total", rank="0") or 0)
    job.signal(signal.SIGSTOP, rank=1)
    assert read(port) is not None, "rank 0 answers while another rank is stopped"
    job.signal(signal.SIGCONT, rank=1)
    before = first.of("steps_total", rank="1") or 0
    job.until(lambda: ((read(port) or first).of("steps_total", rank="1") or 0) > before, "rank 1 goes on")
    job.signal(signal.SIGKILL, rank=2)
    assert job.wait() != 0
    assert read(port) is None, "the port is free after the job"


@pytest.mark.full_matrix("mpi")
def test_a_port_that_is_taken_is_told_and_the_job_goes_on(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        variables = {"HOROVOD_PARTIAL_METRICS_PORT": str(taken.getsockname()[1])}
        assert job.run("recorded", "majority", "5", "whole", **variables) == 0, job.output()
    assert "rank 0 serves no metrics, because it cannot listen at 127.0.0.1, port" in job.output()


@pytest.mark.full_matrix
@pytest.mark.launch(ranks=(3,), transports=("gloo",), full_transports=("gloo",))
def test_an_elastic_job_serves_metrics_after_it_has_lost_a_rank(job: Job, port: int) -> None:
    variables = {"HOROVOD_PARTIAL_METRICS_PORT": str(port), "HOROVOD_PARTIAL_STALL_SECONDS": HEARTBEATS}
    job.start_elastic("elastic", "majority", "2", hosts="localhost:2\n127.0.0.1:1\n", **variables)
    seen: list[float | None] = []

    def has_shrunk() -> bool:
        if (scrape := read(port)) is not None:
            seen.append(scrape.of("ranks"))
        return 2 in seen

    job.until(has_shrunk, "the metrics tell of two ranks")
    assert job.wait() == 0, job.output()
    assert "serves no metrics" not in job.output()


# --- Prometheus -------------------------------------------------------------------------------------------------------


def expressions() -> list[str]:
    """All expressions of the dashboard, as Grafana sends them."""
    board = json.loads((GRAFANA / "dashboard.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [expression.replace("$job", ".*").replace("$__rate_interval", "20s") for expression in found]


@pytest.fixture
def prometheus(port: int, tmp_path: Path) -> Iterator[str]:
    """A Prometheus that scrapes the job; its address."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Prometheus, of Debian's package prometheus for example")
    config = (GRAFANA / "prometheus.yml").read_text().replace("9464", str(port)).replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([program, *options, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            yield address
        finally:
            server.terminate()
            server.wait(20)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # Prometheus still begins
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from None
    except OSError:  # it does not listen yet
        return []


@pytest.mark.full_matrix
def test_a_prometheus_scrapes_what_the_dashboard_shows(job: Job, port: int, prometheus: str) -> None:
    start(job, port, "majority")
    slow = "horovod_partial_slowness_ratio > 1"
    job.until(
        lambda: [of["metric"]["rank"] for of in query(prometheus, slow)] == ["2"],
        "Prometheus knows that rank 2 is slow",
    )
    stolen = re.compile("horovod_partial_(stolen|throttled|pressure)_ratio")  # not every machine tells these
    shown = [expression for expression in expressions() if not stolen.search(expression)]
    job.until(lambda: all(query(prometheus, expression) for expression in shown), "each panel has data")
    job.signal(signal.SIGSTOP, rank=1)
    rate = 'rate(horovod_partial_steps_total{rank="1"}[5s]) == 0'
    job.until(lambda: bool(query(prometheus, rate)), "Prometheus sees that rank 1 stands still")
    job.signal(signal.SIGKILL, rank=1)
    assert job.wait() != 0
    end = time.monotonic() + PATIENCE_SECONDS
    while [of["value"][1] for of in query(prometheus, "up")] != ["0"]:
        assert time.monotonic() < end, "Prometheus does not see that the job has ended"
        time.sleep(0.1)
