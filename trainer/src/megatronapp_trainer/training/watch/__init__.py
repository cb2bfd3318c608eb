"""Checks, alerts and profiles of a running training, and the memory of its device."""
