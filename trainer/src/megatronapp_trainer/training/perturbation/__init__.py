"""Perturbation of models that train, by orders at step boundaries."""
