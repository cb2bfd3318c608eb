"""Checks of a worker's node and links before its ranks start."""
