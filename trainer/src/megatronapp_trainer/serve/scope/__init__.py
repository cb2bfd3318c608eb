"""Routes of MegaScope on rank 0."""
