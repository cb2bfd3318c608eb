"""Writing of checkpoints: what each rank writes, in its own process or in the background, and how it is published."""
