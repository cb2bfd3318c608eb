"""Choice of the device, and the few operations that differ between GPU and CPU."""

import dataclasses
import os
import warnings

import torch

from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

_NOISE = (
    "Please use DTensor instead",  # of sharded tensors, which its checkpoints are made of
    "full scope is deprecated",  # of a default value of TransformerConfig
    "If you are using transformer_engine",  # of recomputed attention, whatever it is computed by
    "The .grad attribute of a Tensor that is not a leaf",  # asked of every shard by the distributed optimizer
)
"""Warnings of megatron-core 0.16 about itself, which no user can act on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Device on which this rank computes."""

    torch_device: torch.device
    name: str
    """Name for messages: ``cpu`` or ``cuda:0 NVIDIA ...``."""

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor to this device; to a GPU the copy runs in parallel with the host, out of pinned memory."""
        return sent_to(self.torch_device, tensor)

    def to_host(self, tensor: torch.Tensor) -> "HostCopy":
        """Start copying a small tensor to the host."""
        return HostCopy(tensor, is_cuda=self.is_cuda)


def sent_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to this device; to a GPU the copy runs in parallel with the host, out of pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class HostCopy:
    """A tensor that is being copied to the host. Reading it waits for the copy alone, not for work queued after it."""

    def __init__(self, tensor: torch.Tensor, *, is_cuda: bool) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """Return True if it can be read without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> torch.Tensor:
        """Return the tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def hide_gpus() -> None:
    """Let this process see no GPU from now on. Raises UsageError if it has used one already."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_available():
        raise UsageError(
            "--fbd-forward-on-cpu: this process has used a GPU before its rank hides them; start forward ranks with "
            "CUDA_VISIBLE_DEVICES= set to nothing"
        )


def prepare_device(place: int | None, ranks_per_gpu: int = 1) -> Device:
    """Choose the device of this process and make megatron-core ready for it.

    Must run before a model is built. Raises UsageError if there are GPUs, but too few of them, or none although
    ranks are to share them.

    `place`: index among the ranks of the node that use its GPUs, the local rank where all do; None for a rank that runs
    on the CPU although there may be GPUs.
    """
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    if place is None:
        hide_gpus()
        return _prepare_cpu()
    if torch.cuda.is_available():
        index = place // ranks_per_gpu
        if index >= torch.cuda.device_count():
            raise UsageError(
                f"number {place} of the ranks here that use a GPU has none: this machine shows "
                f"{torch.cuda.device_count()}; "
                "start one rank per GPU, or none of them with CUDA_VISIBLE_DEVICES= set to nothing"
            )
        torch.cuda.set_device(index)
        with silence_megatron_imports():
            import megatron.core.models.gpt.gpt_layer_specs
            import megatron.core.optimizer  # noqa: F401 - imported here to suppress its warnings
        if ranks_per_gpu > 1:
            from megatronapp_trainer.device import shared_gpu

            shared_gpu.install()
        device = torch.device("cuda", index)
        return Device(torch_device=device, name=f"{device} {torch.cuda.get_device_name(device)}")
    if ranks_per_gpu > 1:
        raise UsageError(f"--ranks-per-gpu {ranks_per_gpu}: this machine shows no GPU; leave it out")
    return _prepare_cpu()


def _prepare_cpu() -> Device:
    from megatronapp_trainer.device import cpu

    cpu.install()
    return Device(torch_device=torch.device("cpu"), name="cpu")
