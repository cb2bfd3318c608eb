"""Detector in a separate process: what judges steps there, and the hub's end of it."""
