"""Errors of serving, in addition to those of generation.

GenerationError
    ├── NotReadyError       1  the model is being loaded
    ├── SlowReaderError     1  a client does not read its answer
    └── StoppingError       1  the server was asked to stop
"""

from megatronapp_trainer.inference.errors import GenerationError


class NotReadyError(GenerationError):
    """The model is being loaded."""


class SlowReaderError(GenerationError):
    """A client does not read its answer."""


class StoppingError(GenerationError):
    """The server was asked to stop."""
