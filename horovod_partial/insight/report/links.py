"""Finds hosts with a slow link, by what the TCP connections between the ranks have carried."""

from __future__ import annotations

import numpy as np

from horovod_partial.insight.recording import Recording

_SLOW = 4.0  # a host's link is slow if the median host's carries this many times as much in a second
_LEAST = 0.1  # connections count if they carry at least this share of a rank's gradients


def slow(recording: Recording) -> list[str]:
    """Return a sentence for each host with a slow link. Even the fastest of its connections, in or out, is slow then.

    Linux measures how fast bytes of a connection arrive at the other end, and leaves out the time in which none are sent.
    """
    ranks = recording.ranks.values()
    owners: dict[str, set[str]] = {}
    for rank in ranks:
        for address in rank.tables["links"]["from"]:
            owners.setdefault(address, set()).add(rank.host)
    # An address of several hosts, for example of a bridge of containers, tells nothing.
    hosts = {address: next(iter(of)) for address, of in owners.items() if len(of) == 1}
    least = max(1.0, _LEAST * max(rank.tables["steps"]["bytes"].sum() for rank in ranks))
    rates: dict[str, float] = {}  # of the fastest connection of each host, in MB/s
    for rank in ranks:
        links = rank.tables["links"]
        for to in hosts.keys() & set(links["to"]):
            nbytes, rate = (links[column][links["to"] == to] for column in ("bytes", "rate"))
            for host in (rank.host, hosts[to]) if np.diff(nbytes).clip(0).sum() >= least else ():
                rates[host] = max(rates.get(host, 0.0), float(np.median(rate)) / 1e6)
    usual = float(np.median(list(rates.values()))) if rates else 0.0
    return [
        f"The link of host {host} is slow: its connections carry {rate:.3g} MB/s, and those of other hosts {usual:.3g} MB/s."
        for host, rate in sorted(rates.items())
        if _SLOW * rate < usual
    ]
