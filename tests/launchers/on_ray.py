"""Jobs on a real Ray, with four workers each: `on_ray.py RESULTS.json` writes what came of them, by their names."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import jobs
import ray
from horovod.ray import RayExecutor


def run(function: Callable[..., Any], *arguments: str, first: dict[str, str] | None = None, **variables: str) -> Any:
    """What the ranks return, or the text of the error.

    Args:
        function: that each worker calls.
        arguments: of it.
        first: variables for rank 0 alone.
        variables: for all.
    """
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=digits.RANKS)
    executor.start(extra_env_vars=variables)
    try:
        if first:
            executor.execute_single(lambda _: os.environ.update(first))
        return executor.run(function, args=list(arguments))
    except ray.exceptions.RayError as error:
        return str(error)
    finally:
        executor.shutdown()


def main() -> None:
    # It stands for a cluster of one node. Each worker is given a CPU, though the machine may have fewer.
    ray.init(num_cpus=digits.RANKS, object_store_memory=80 * 2**20, include_dashboard=False)
    results = {
        "digits": run(digits.train, HOROVOD_PARTIAL_SYNC="majority", OMP_NUM_THREADS="1"),
        "of one": run(jobs.settings, first={"HOROVOD_PARTIAL_BUCKET_MB": "5"}),
        "contradiction": run(jobs.settings, first={"HOROVOD_PARTIAL_SYNC": "solo"}),
        "misspelt": run(jobs.settings, HOROVOD_PARTIAL_SNYC="solo"),
        "unknown": run(jobs.settings, HOROVOD_PARTIAL_SYNC="most"),
        "failure": run(jobs.fail),
        "resumed": run(jobs.stop_and_resume, tempfile.mkdtemp()),
    }
    ray.shutdown()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
