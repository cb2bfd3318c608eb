"""The autograd graph of a chunk in two halves: what a forward pass saves, and backward passes on it."""
