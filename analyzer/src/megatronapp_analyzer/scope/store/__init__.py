"""Bounded storage of runs and their frames."""
