"""Translation of commands of MegatronApp and Megatron-LM: `megatronapp translate`, and a page."""
