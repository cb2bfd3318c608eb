"""Parts of a worker's pod."""
