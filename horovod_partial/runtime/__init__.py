"""A framework's Horovod with our hooks: attached, its life cycle, the way into the extension."""
