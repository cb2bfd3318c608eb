"""Training loop, optimizer, evaluation and progress."""
