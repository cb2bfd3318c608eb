"""Checkpoints in torch's distributed format through megatron-core, published atomically: `manager`."""
