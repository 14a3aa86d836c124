"""Our modules under Horovod's names, and unedited programs of Horovod's run with them."""
