"""Makes metrics of Prometheus from names, texts and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Prometheus's terms: a sample has labels and a value; a family has a name, a help text, and samples with equal labels.
Sample = tuple[dict[str, str], float]
Family = tuple[str, str, Sequence[Sample]]


class _Collector:
    def __init__(self, families: Iterable[Family], prefix: str) -> None:
        self._families = families
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for name, help_text, samples in self._families:
            if not samples:
                continue
            names = list(samples[0][0])
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = kind(self._prefix + name, help_text, labels=names)
            for labels, value in samples:
                metric.add_metric([labels[one] for one in names], value)
            yield metric


def registry(families: Iterable[Family], prefix: str) -> CollectorRegistry:
    """Return a registry of Prometheus that iterates over `families` each time it is read.

    Each name gets the prefix. A family whose name ends with `_total` is a counter, and any other one a gauge. Families
    without samples are left out.
    """
    made = CollectorRegistry()
    made.register(_Collector(families, prefix))
    return made
