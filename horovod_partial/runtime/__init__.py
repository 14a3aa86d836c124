"""Attaches this package to a framework's Horovod, and does what ranks do in `init`, in a flush and at a job's end."""
