"""Capture of values on a rank: reductions, commands and probes."""
