"""Errors of generation.

GenerationError         1  (a TrainerError) anything of generation that went wrong
├── RequestError       64  a request that cannot be served; `field` names what to change
├── QueueFullError      1  as many requests wait as may
├── AnalysisMemoryError 1  a rank lacks the memory for an analysis of MegaScope
├── CacheTooLargeError 64  the cache of keys and values does not fit the device
└── EngineLostError    69  a rank died or failed: open requests have ended, and the gang must be started again
"""

from megatronapp_common.names import ExitCode
from megatronapp_trainer.errors import TrainerError


class GenerationError(TrainerError):
    """Base of the errors of generation."""


class RequestError(GenerationError):
    """A request that cannot be served. `field` is the one of `GenerationRequest` to change."""

    exit_code = ExitCode.USAGE

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class QueueFullError(GenerationError):
    """Refusal of a request because as many wait as may."""


class AnalysisMemoryError(GenerationError):
    """An analysis for which a rank lacks memory. Other requests continue."""


class CacheTooLargeError(GenerationError):
    """The cache of keys and values does not fit the device; the text says what does."""

    exit_code = ExitCode.USAGE


class EngineLostError(GenerationError):
    """Loss or failure of a rank. Open requests have ended, and the gang must be started again."""

    exit_code = ExitCode.PEER_LOST
