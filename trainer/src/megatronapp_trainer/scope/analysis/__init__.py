"""Analyses of a known text on the ranks: what the numbers mean is in docs/reading-a-model.md."""
