"""Estimation of clock offsets between nodes from the training's own traffic, and a check of the clocks of devices.

Ranks of one boot id share the clock of their node; each device has its own.
"""
