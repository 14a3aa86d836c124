"""Partial and group collectives for a stock Horovod.

The front ends are `horovod_partial.torch` and its siblings; this package holds what they share:

* `policies`: when a round may close (`Full`, `Solo`, `Majority`, `Quorum`)
* `settings`: every environment variable, in one place
* `runtime`: attaching to a framework's Horovod, and leaving it
* `statistics`: what happened to the rounds
"""

__version__ = "0.1.0"
