"""`megatronapp training`: pause, resume, step and stop of a running training."""
