"""Tells from a recording which rank is slow, where the time went, and what waiting has cost.

`summary`, `slowness` and `links` compute this, and `comparison` what changed from one run to another. `text` and `page`
(with `figures`) show it.
"""

from horovod_partial.insight.report.slowness import Slowness
from horovod_partial.insight.report.summary import RankSummary, Summary

__all__ = ["RankSummary", "Slowness", "Summary"]
