"""Probe texts with MegaFBD: backward ranks command the passes, and forward ranks read the texts."""

import contextlib
from collections.abc import Iterator
from typing import Any

from megatronapp_trainer.fbd.channels.commands import Split
from megatronapp_trainer.fbd.remote_data import RemoteSamples
from megatronapp_trainer.hooks.probe_texts import ProbeTexts


class RemoteTexts:
    """`ProbeTexts` of a backward rank, which has none of the texts."""

    def __init__(self, microbatches: int, rounds: int) -> None:
        self.microbatches = microbatches
        self.rounds = rounds

    def iterator(self) -> Iterator[Any]:
        """Return what names the texts."""
        return RemoteSamples(Split.PROBES)

    def reading(
        self, _step: int, *, perturbation: str | None = None, replicas: int = 1
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect."""
        del perturbation, replicas
        return contextlib.nullcontext()


class CommandedTexts:
    """Probe texts of a forward rank, of which each command of its backward ranks reads one round."""

    def __init__(self, probes: ProbeTexts, replicas: int) -> None:
        """`replicas`: that take turns on this rank; all of them read the same texts."""
        self._probes = probes
        self._replicas = replicas
        self._left = 0
        self._reading = contextlib.ExitStack()
        self._iterators: list[Iterator[Any]] = []

    @contextlib.contextmanager
    def round(self, step: int, perturbation: str | None) -> Iterator[list[Iterator[Any]]]:
        """Read the next round inside the context; yields an iterator of microbatches for each replica.

        `perturbation`: digest of the recipe that was in force in the newest step.
        """
        if not self._left:
            self._left = self._probes.rounds
            reading = self._probes.reading(step, perturbation=perturbation, replicas=self._replicas)
            self._reading.enter_context(reading)
            self._iterators = [self._probes.iterator() for _ in range(self._replicas)]
        yield self._iterators
        self._left -= 1
        if not self._left:
            self._reading.close()
