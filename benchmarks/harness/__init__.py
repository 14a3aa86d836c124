"""What benchmarks and examples share: starting ranks, delaying them, and reporting figures."""

from harness.alternating import alternate, in_turn
from harness.delays import Delays, Floors, LinearSkew, RandomVictims, Rotating, SlowRank
from harness.launch import Framework, LaunchError, Transport, busy_processes, default_transport, launch
from harness.progress import progress
from harness.report import arguments, origin, print_table, write_json
from harness.seeds import ahead_in_time, deviation, standard_error

__all__ = [
    "Delays",
    "Floors",
    "Framework",
    "LaunchError",
    "LinearSkew",
    "RandomVictims",
    "Rotating",
    "SlowRank",
    "Transport",
    "ahead_in_time",
    "alternate",
    "arguments",
    "busy_processes",
    "default_transport",
    "deviation",
    "in_turn",
    "launch",
    "origin",
    "print_table",
    "progress",
    "standard_error",
    "write_json",
]
