"""Where the tests of faults find the harness of the parallel tests, and their own parts."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "parallel")]
