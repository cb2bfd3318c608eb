"""Execution of the model: caches, attention, CUDA graphs and sampling."""
