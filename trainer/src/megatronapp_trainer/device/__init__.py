"""The device of this process: one GPU by LOCAL_RANK, or the CPU, on which megatron-core runs through a scoped layer."""

from megatronapp_trainer.device.place import Device, prepare_device

__all__ = ["Device", "prepare_device"]
