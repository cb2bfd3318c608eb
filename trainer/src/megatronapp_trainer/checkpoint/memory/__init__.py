"""Checkpoints in the memory of the workers: each rank's state in a file of its worker, with copies on other workers."""
