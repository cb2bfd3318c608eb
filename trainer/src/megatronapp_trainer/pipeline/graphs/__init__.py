"""CUDA graphs of training passes."""
