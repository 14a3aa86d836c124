"""Finds hosts with a slow link, by what the TCP connections between the ranks have carried."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.recording import Recording

_SLOW = 3.0  # a host's link is slow if the median host's carries this many times as much in a second
_LEAST = 0.1  # connections between two hosts count if they carry at least this share of a rank's gradients


def slow(recording: Recording) -> list[str]:
    """Return a sentence for each host with a slow link. Even the fastest of its connections, in or out, is slow then.

    A connection's seconds are those in which bytes are under way and the receiver has room for them.
    """
    ranks = recording.ranks.values()
    hosts = {address: rank.host for rank in ranks for address in rank.tables["links"]["from"]}
    carried: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))  # bytes, and microseconds
    for rank in ranks:
        links = rank.tables["links"]
        for to in hosts.keys() & set(links["to"]):
            rows = np.column_stack([links["bytes"], links["busy"]])[links["to"] == to]
            carried[rank.host, hosts[to]] += rows[-1] - rows[0]
    least = max(1.0, _LEAST * max(rank.tables["steps"]["bytes"].sum() for rank in ranks))
    rates: dict[str, float] = defaultdict(float)  # of the fastest connections of each host, in MB/s
    for ends, (nbytes, busy) in carried.items():
        for host in ends if nbytes >= least else ():
            rates[host] = max(rates[host], nbytes / max(busy, 1.0))
    usual = float(np.median(list(rates.values()))) if rates else 0.0
    return [
        f"The link of host {host} is slow: its connections carry {rate:.3g} MB/s, and those of other hosts {usual:.3g} MB/s."
        for host, rate in sorted(rates.items())
        if _SLOW * rate < usual
    ]
