"""Metrics of a running job for Prometheus, which rank 0 serves, and a table of them."""
