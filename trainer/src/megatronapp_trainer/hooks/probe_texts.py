"""Runs of probe texts, as the training loop sees them: a run without probe texts imports no more of them."""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class ProbeTexts(Protocol):
    """Fixed texts, on one rank. They are read in `rounds` of `microbatches` each."""

    microbatches: int
    rounds: int

    def iterator(self) -> Iterator[Any]:
        """Return the microbatches of all rounds."""

    def reading(
        self, step: int, *, perturbation: str | None = None, replicas: int = 1
    ) -> contextlib.AbstractContextManager[None]:
        """Capture the forward passes inside the context, after `step` steps, and send what they gave.

        `perturbation`: digest of the recipe that was in force in the newest step. `replicas`: that a forward rank of
        MegaFBD runs in turns; the first one is captured.
        """
