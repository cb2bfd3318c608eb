"""Readers of steps that read prompts, such as the analyses of MegaScope."""

from typing import Protocol

from megatronapp_trainer.hooks.forward_observer import Segment


class PromptReader(Protocol):
    """Reader of values of a step, called on the engine's thread of every rank.

    Unlike a `ForwardObserver` it may exchange values with other ranks: `begin` precedes all transfers of the step, and
    `end` follows them.
    """

    def begin(self, segments: tuple[Segment, ...]) -> bool:
        """Prepare for a step that reads these tokens of prompts. Returns whether `end` is to follow."""

    def end(self) -> None:
        """Use the values of the step, which this rank has computed and passed on. May wait for the other ranks."""
