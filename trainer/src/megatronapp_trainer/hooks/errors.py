"""Errors of looking at a model."""

from megatronapp_trainer.errors import UsageError


class CaptureError(UsageError):
    """Something was to be looked at that this model does not have, or that nobody can look at so."""
