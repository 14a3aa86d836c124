"""Partial and group collectives for a stock Horovod.

The front ends are `horovod_partial.torch`, `horovod_partial.tensorflow` and `horovod_partial.keras`.
"""

__version__ = "0.1.0"
