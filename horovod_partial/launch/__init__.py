"""Starting the ranks of a job by launchers that Horovod's own does not know."""
