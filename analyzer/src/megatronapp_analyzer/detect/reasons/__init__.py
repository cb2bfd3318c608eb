"""Reasons of causes, found after a verdict: what made a device or host slow, from spans and counters."""
