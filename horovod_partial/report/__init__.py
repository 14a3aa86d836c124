"""What a recording tells: which rank is slow, where the time went, and what waiting has cost.

`summary` finds it out, with `slowness`; `text`, `page` (with `figures`), `trace` and `prometheus` say it.
"""

from horovod_partial.report.slowness import Slowness
from horovod_partial.report.summary import RankSummary, Summary

__all__ = ["RankSummary", "Slowness", "Summary"]
