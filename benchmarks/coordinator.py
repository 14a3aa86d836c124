"""What our part of a negotiating cycle costs rank 0, by the number of ranks.

    cmake --build build/release --target bench_coordinator    # after `make build`, with libbenchmark-dev
    .venv/bin/python benchmarks/coordinator.py [--json FILE]

tests/cpp/bench_coordinator.cc makes the reports, and says what is in the times. Medians of `--repetitions`, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import harness

PROGRAM = Path(__file__).resolve().parents[1] / "build" / "release" / "bench_coordinator"


def main() -> None:
    harness.origin()  # before anything is measured
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    command = [PROGRAM, f"--benchmark_repetitions={options.repetitions}", "--benchmark_format=json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    runs = [one for one in json.loads(done.stdout)["benchmarks"] if one.get("aggregate_name") == "median"]
    figures: dict[str, dict[str, Any]] = {}
    for run in runs:
        case, ranks = run["run_name"].split("/")[:2]
        counters = {name: run[name] for name in ("report_bytes", "closing_bytes") if name in run}
        figures.setdefault(case, {})[ranks] = {f"{run['time_unit']} of a cycle": run["cpu_time"], **counters}
    harness.write_json(options.json, {"figures": figures})
    columns = list(next(iter(figures.values())))
    rows = [
        [case, *(f"{next(iter(of_ranks[ranks].values())):.1f}" for ranks in columns)]
        for case, of_ranks in figures.items()
    ]
    harness.print_table("A cycle on rank 0, in microseconds, by the number of ranks", ["case", *columns], rows)


if __name__ == "__main__":
    main()
