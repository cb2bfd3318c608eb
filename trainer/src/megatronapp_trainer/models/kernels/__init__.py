"""Kernels of training in Triton, and the choice between them and plain torch."""
