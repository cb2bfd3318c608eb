"""Probe texts of a training: fixed texts that are run through the current weights after captured steps."""
