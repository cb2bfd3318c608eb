"""Estimation of clock offsets between nodes from the training's own traffic. Ranks of one boot id share a clock."""
