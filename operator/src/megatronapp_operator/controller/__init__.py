"""The operator's process on a cluster: watches, queue and workers under a lease."""
