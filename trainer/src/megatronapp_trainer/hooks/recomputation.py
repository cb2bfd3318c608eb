"""Detection of forward passes that are repeated for a backward pass."""

import torch


def is_recomputing() -> bool:
    """Return True within a backward pass, whose forward passes repeat earlier ones."""
    current_task: int = torch._C._current_graph_task_id()  # torch.utils.checkpoint uses it, too
    return current_task != -1
