"""The launcher of a worker: gathers the gang, starts and supervises the ranks, reports how they ended; imports no
torch.
"""
