"""Jobs on a real Spark, with four tasks: `on_spark.py RESULTS.json` writes what came of them, by their names."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import horovod.spark
import jobs
from pyspark.sql import SparkSession


def run(function: Callable[..., Any], *arguments: str, use_mpi: bool = False, **variables: str) -> Any:
    """What the ranks return, or the text of the error.

    Args:
        function: that each rank calls.
        arguments: of it.
        use_mpi: in place of Gloo.
        variables: for all ranks.
    """
    try:
        return horovod.spark.run(
            function,
            args=arguments,
            num_proc=digits.RANKS,
            use_mpi=use_mpi,
            use_gloo=not use_mpi,
            env=os.environ | variables,
            stdout=sys.stdout,
            stderr=sys.stderr,
        )
    except RuntimeError as error:
        return str(error)


def main() -> None:
    spark = (
        SparkSession.builder.master(f"local[{digits.RANKS}]")
        .config("spark.driver.memory", "512m")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    results = {
        "digits": run(digits.train, HOROVOD_PARTIAL_SYNC="majority"),
        "digits over MPI": run(digits.train, use_mpi=True, HOROVOD_PARTIAL_SYNC="majority"),
        "of the driver": run(jobs.settings, HOROVOD_PARTIAL_SNYC="solo"),
        "failure": run(jobs.fail, HOROVOD_PARTIAL_SYNC="majority"),
        "resumed": run(jobs.stop_and_resume, tempfile.mkdtemp()),
    }
    spark.stop()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
