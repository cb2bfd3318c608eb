"""Perturbations that a server knows by name."""
