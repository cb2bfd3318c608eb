"""Comparison of branches of a generation on the ranks: what the numbers mean is in docs/comparing-runs.md."""
