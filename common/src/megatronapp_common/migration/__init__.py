"""What to run here instead of a command of MegatronApp or Megatron-LM: `megatronapp translate`, and a page."""
