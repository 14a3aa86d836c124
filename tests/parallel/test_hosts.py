"""Jobs on several hosts. `--hosts` spreads other tests over hosts too: `make test-hosts`."""

import re
from pathlib import Path

import pytest
import torch
from harness.torch_training import take_step
from harness.whole_jobs import Job
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial.insight import recording
from horovod_partial.insight.report import Summary


@pytest.mark.launch(hosts=2, transports=("gloo",), full_transports=("gloo", "mpi"))
def test_policies_on_two_hosts(world: World) -> None:
    assert hvd.local_size() == world.size // 2
    for sync in ("solo", "majority", "full", hvd.GroupAverage(2)):
        model = torch.nn.Linear(3, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync=sync)
        hvd.broadcast_parameters(model.state_dict(), 0)
        for _ in range(10):
            take_step(optimizer, lambda model=model: model(torch.randn(16, 3)).square().mean())
        optimizer.flush()
        weights = hvd.allgather(model.weight.detach(), name=world.name("weights"))
        assert (weights - weights[0]).abs().max() == 0


# Horovod's elastic jobs run over Gloo.
@pytest.mark.full_matrix
@pytest.mark.timeout(240)  # what is left may seek the lost host once more, for as long as Gloo likes
@pytest.mark.launch(hosts=2, transports=("gloo",), ranks=(2,))
@pytest.mark.parametrize("policy", ["majority", "full"])
def test_a_host_of_an_elastic_job_is_lost(job: Job, policy: str) -> None:
    before = "host1:1\nhost2:1\n"
    hosts = job.start_elastic("elastic", policy, "1", hosts=before, interface="eth0", HOROVOD_GLOO_TIMEOUT_SECONDS="10")
    job.wait_for_notes("running")
    job.hosts[1].lose()
    hosts.write_text("host1:1\n")
    assert job.wait(seconds=200) == 0, job.output()
    # Horovod numbers hosts in no order, so the rank that is left may be any.
    assert list(job.notes("ended").values()) == ["1 True True"], job.output()


@pytest.mark.full_matrix
@pytest.mark.launch(hosts=3, transports=("gloo",), ranks=(3,))
@pytest.mark.parametrize("policy", ["majority", "full"])
def test_a_host_is_added_to_an_elastic_job(job: Job, policy: str) -> None:
    before = "host1:2\nhost2:1\n"
    ended = job.run_elastic("elastic", policy, "4", hosts=before, then=before + "host3:1\n", interface="eth0")
    assert ended == dict.fromkeys(range(4), "4 True True"), job.output()


@pytest.mark.launch(hosts=4, transports=("gloo",), full_transports=("gloo", "mpi"), ranks=(4,))
def test_a_slow_link_is_named(job: Job, tmp_path: Path) -> None:
    """The host of rank 1 has it. Rank 3 computes for longer than the others."""
    job.start("recorded", "full", "20", "large", HOROVOD_PARTIAL_RECORD=str(tmp_path / "recordings"))
    with job.hosts[1].slow("80mbit"):
        assert job.wait() == 0, job.output()
    waiting = Summary.of(recording.load(tmp_path / "recordings")).waiting
    assert re.findall(r"The link of host (\S+) is slow", waiting) == ["host2"], waiting
