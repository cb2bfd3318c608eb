"""Parts of steps and probes that ranks send: headers, tensors of shards, and their merging. Pure."""
