"""Parts of a worker's pod, one module each."""
