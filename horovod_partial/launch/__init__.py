"""Starts the ranks of a job with launchers that Horovod itself does not support."""
