"""Models built from megatron-core's modules."""
