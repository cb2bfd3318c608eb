"""Errors of serving, beside those of generation.

GenerationError
├── NotReadyError       1  the model is being loaded
└── StoppingError       1  the server was asked to stop
"""

from megatronapp_trainer.generate.errors import GenerationError


class NotReadyError(GenerationError):
    """The model is being loaded."""


class StoppingError(GenerationError):
    """The server was asked to stop."""
