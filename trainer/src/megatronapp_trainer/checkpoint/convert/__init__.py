"""Conversion of weights between Hugging Face folders and checkpoints of this trainer, bit for bit: `job`."""
