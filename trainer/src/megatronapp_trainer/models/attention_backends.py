"""Order in which torch's fused attention chooses its kernels."""

import contextlib
from collections.abc import Iterator

from torch.nn.attention import SDPBackend, sdpa_kernel

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device

_REST = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
CUDNN_FIRST = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_REST)
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_REST)


def order_of_backends(config: TrainerConfig) -> tuple[SDPBackend, ...] | None:
    """Return the kernels of attention on GPUs, the first choice first; None: torch's own order.

    torch skips a kernel that does not take the call. By itself cuDNN's is first only for plain causal attention without
    dropout, where its results were compared, and not under ``--deterministic-mode``.
    """
    model = config.model
    if model.attention_backend == "fused":
        return CUDNN_FIRST
    if model.attention_backend == "flash":
        return FLASH_FIRST
    is_plain = model.model_type == "gpt" and not config.data.separates_documents and model.attention_window is None
    if is_plain and model.attention_dropout == 0 and not config.precision.deterministic_mode:
        return CUDNN_FIRST
    return None


@contextlib.contextmanager
def attention_backends(config: TrainerConfig, device: Device) -> Iterator[None]:
    """Choose the kernels of attention of the passes inside."""
    order = order_of_backends(config) if device.is_cuda else None
    if order is None:
        yield
        return
    with sdpa_kernel(list(order), set_priority=True):
        yield
