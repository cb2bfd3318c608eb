"""Checks before ranks start."""
