"""Memory that a rank may still allocate where its model is."""

import torch

from megatronapp_trainer.device.host_memory import free_host_bytes
from megatronapp_trainer.device.place import Device


def free_bytes(device: Device) -> int:
    """Return the free memory of the device, torch's unused blocks included; of a host this rank's part of it."""
    if not device.is_cuda:
        return free_host_bytes()
    free, _ = torch.cuda.mem_get_info(device.torch_device)
    unused = torch.cuda.memory_reserved(device.torch_device) - torch.cuda.memory_allocated(device.torch_device)
    return int(free + unused)
