"""Errors of hooks and captures."""

from megatronapp_trainer.errors import UsageError


class CaptureError(UsageError):
    """A site or capture that this model does not have, or that cannot be registered, read or written."""
