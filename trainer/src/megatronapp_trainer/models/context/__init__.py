"""Attention over sequences that are divided over the ranks of a context group."""
