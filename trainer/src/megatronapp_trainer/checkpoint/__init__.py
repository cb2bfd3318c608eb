"""Checkpoints in torch's distributed format through megatron-core, whole or not there at all: `manager`."""
