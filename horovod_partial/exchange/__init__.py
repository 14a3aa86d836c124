"""What optimizers and tapes of every framework exchange with other ranks: gradients before a step, or models after it."""
