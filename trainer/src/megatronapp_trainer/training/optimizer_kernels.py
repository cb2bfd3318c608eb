"""The optimizer's work over all parameters at once: norm, scaling and Adam in a few kernels, one wait for the device.

Without Apex and Transformer Engine megatron-core 0.16 reads the norm of each parameter from the device, scales
gradients one by one, and takes torch's Adam unfused.
"""

import importlib
from typing import Any

import torch

from megatronapp_trainer.checkpoint.optimizer_state import inner_optimizers


def install() -> None:
    """Let megatron-core compute norms and scale gradients over lists of tensors, where it lacks kernels for it."""
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    local: Any = importlib.import_module("megatron.core.utils")
    if clip.l2_norm_impl is local.local_multi_tensor_l2_norm:
        clip.l2_norm_impl = list_norm
    if clip.multi_tensor_scale_impl is local.local_multi_tensor_scale:
        clip.multi_tensor_scale_impl = scale_lists


def list_norm(
    _chunk_size: int, _noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the 2-norm of one list of tensors as a tensor [1] on their device; nothing is read from it."""
    (tensors,) = tensor_lists
    norms = torch._foreach_norm(tensors)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale_lists(
    _chunk_size: int, _noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Scale tensors in place; megatron-core gives the same list as source and target."""
    source, target = tensor_lists
    if source is not target:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, scale)


def fuse_adam(optimizer: Any) -> None:  # noqa: ANN401 - MegatronOptimizer
    """Use torch's fused Adam for parameters on a GPU.

    On a CPU its vectorised and its scalar path round differently, so that results would depend on where a replica's
    shard begins.
    """
    for part in inner_optimizers(optimizer):
        adam = part.optimizer
        if not isinstance(adam, torch.optim.Adam) or not _all_on_gpu(adam):
            continue
        for settings in (adam.defaults, *adam.param_groups):
            settings["fused"], settings["foreach"] = True, False


def _all_on_gpu(adam: torch.optim.Adam) -> bool:
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)
