"""A training run of this rank as `pretrain` does it, of which losses and gradient norms are kept."""

import warnings
from typing import Any

from recording_reporter import RecordingReporter

Record = tuple[list[float], list[float]]
"""Losses and gradient norms by step."""


class PretrainReporter(RecordingReporter):
    """A reporter of a whole run."""

    def line(self, text: str) -> None:
        """Discard a line of the log."""

    def plan(self, report: object) -> None:
        """Discard a plan of MegaDPP."""

    def resumed(self, *arguments: object, **options: object) -> None:
        """Discard where the run resumes."""

    def close(self) -> None:
        """Do nothing: what was reported is in memory."""


def train(flags: str) -> Record | None:
    """Train to the end. Returns what the reporting rank has seen, None on the others."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training import progress

    reporter: Any = PretrainReporter()
    patched: Any = progress
    patched.make_reporter = lambda _config, layout: reporter if layout.is_reporter else None
    pretrain.pretrain(parse(flags.split()))
    return (reporter.losses, reporter.grad_norms) if reporter.losses else None
