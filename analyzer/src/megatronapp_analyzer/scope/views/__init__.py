"""Frames, tiles and exports made from stored steps."""
