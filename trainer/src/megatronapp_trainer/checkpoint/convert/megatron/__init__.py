"""Checkpoints of Megatron-LM: arguments and weights of torch_dist and of the legacy layout."""
