"""Attaches to a framework's Horovod. What the ranks do in `init`, in a flush and at the end of a job."""
