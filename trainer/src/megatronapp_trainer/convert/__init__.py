"""Weights between Hugging Face folders and checkpoints of this trainer, bit for bit in both directions: `job`."""
