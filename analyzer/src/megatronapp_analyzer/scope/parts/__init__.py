"""What ranks send of a step or probe: headers, tensors of shards, and their merging. Pure."""
