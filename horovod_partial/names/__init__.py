"""Lets programs that were written for Horovod use this package, under the names of Horovod's modules."""
