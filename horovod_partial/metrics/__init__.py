"""Metrics of jobs for Prometheus: a running job's, which rank 0 serves, and those of a recording's summary."""
