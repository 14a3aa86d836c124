"""Attaches to a framework's Horovod, and does what ranks do in `init`, in a flush and at the end of a job."""
