"""Training data: `megatronapp data prepare`, tokenizers, datasets, samplers and batches."""
