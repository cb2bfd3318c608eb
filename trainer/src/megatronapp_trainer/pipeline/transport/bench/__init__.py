"""`megatronapp transport bench`: bandwidth and latency of the native transport on this machine."""
