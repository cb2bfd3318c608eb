"""Perturbation of a model that computes: noise, parameters, activations (docs/perturbation.md).

Needs no generation engine, so that models that train can use it, too.
"""
