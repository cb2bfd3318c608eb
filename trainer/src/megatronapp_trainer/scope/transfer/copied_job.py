"""Frames of a captured step of a training, made of one copy from the device."""

from megatronapp_trainer.scope.transfer.device_copy import PendingCopy


class CopiedJob:
    """Size and readiness of such a job, which adds its kind, frames and marks (`FrameJob`)."""

    def __init__(self, copy: PendingCopy) -> None:
        self._copy = copy

    @property
    def nbytes(self) -> int:
        """Size in the host's memory."""
        return self._copy.nbytes

    def ready(self) -> bool:
        """Return True once the copy is done."""
        return self._copy.ready()
