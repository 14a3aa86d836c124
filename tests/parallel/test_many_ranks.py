"""Many more ranks than cores. Starting them takes a minute or two, so these run with the full matrix only."""

import pytest
from harness.whole_jobs import Job

POLICIES = ("full", "majority", "solo", "group_average:4", "partial_reduce:3", "weighted_average:4,0.9")


@pytest.mark.full_matrix
@pytest.mark.launch(ranks=(16, 32))
@pytest.mark.timeout(900)
def test_many_ranks_train_and_end_when_one_is_killed(job: Job) -> None:
    job.start("many_ranks", *POLICIES)
    assert job.wait(seconds=800) != 0
    everybody = set(range(job.setup.ranks))
    trained = {policy: set(job.notes(f"trained.{policy}")) for policy in POLICIES}
    assert trained == dict.fromkeys(POLICIES, everybody), job.output()
