"""Runs of probe texts on a rank: hooks for the passes, one copy to the host, frames to the agent."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.layer_statistics import PERTURBATION
from megatronapp_common.scope.probe_texts import block_of
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import HostMicrobatch
from megatronapp_trainer.scope.texts.text_hooks import TextHooks, TextResult
from megatronapp_trainer.scope.texts.token_texts import Rounds, TokenText
from megatronapp_trainer.scope.transfer.copied_job import CopiedJob
from megatronapp_trainer.scope.transfer.device_copy import (
    BufferLayout,
    DeviceToHostCopier,
    PackedBuffer,
    PendingCopy,
)
from megatronapp_trainer.scope.transfer.publisher import DropPolicy, FrameJob

_DTYPES: Mapping[torch.dtype, str] = {torch.float32: "<f4", torch.int32: "<i4", torch.uint8: "u1"}


class TextsJob(CopiedJob):
    """Results of all texts of a step on their way to the agent."""

    def __init__(
        self,
        header: dict[str, Any],
        results: Sequence[TextResult],
        texts: Sequence[TokenText],
        decode: Callable[[int], str],
        copy: PendingCopy,
    ) -> None:
        super().__init__(copy)
        self._header = header
        self._results = results
        self._texts = texts
        self._decode = decode

    @property
    def kind(self) -> DropPolicy:
        """Return the policy: it waits for an agent that is slow or has no connection."""
        return DropPolicy.PROBE

    def split(self) -> Sequence[FrameJob]:
        """Return this job: the texts of a step are sent or dropped together."""
        return [self]

    def build(self) -> Iterator[Frame]:
        """Yield a frame for each result."""
        data, place = self._copy.data.tobytes(), 0
        for result in self._results:
            size = sum(value.numel() * value.element_size() for value in result.values)
            yield self._frame(result, data[place : place + size])
            place += size

    def marks(self) -> Sequence[Frame]:
        """Return nothing: a hub without a result shows that it is missing."""
        return ()

    def _frame(self, result: TextResult, body: bytes) -> Frame:
        text = self._texts[result.text]
        header = {
            **self._header,
            **result.header,
            "kind": result.kind,
            "text": result.text,
            "tokens": len(text.tokens),
            "arrays": [[_DTYPES[value.dtype], list(value.shape)] for value in result.values],
        }
        if result.kind == "attention":
            header["block"] = block_of(len(text.tokens))
        if result.kind == "text":
            header |= {"source": text.text, "strings": [self._decode(token) for token in text.tokens]}
        if result.kind == "predictions":
            ids = np.frombuffer(body, "<i4", result.values[1].numel(), 4 * result.values[0].numel())
            header["strings"] = {str(token): self._decode(int(token)) for token in np.unique(ids)}
        return Frame(FrameType.TRAINING_PROBE, header, body)


class TextCapture:
    """`ProbeTexts` of a rank that runs forward passes."""

    def __init__(
        self,
        config: TrainerConfig,
        texts: Sequence[TokenText],
        rounds: Rounds,
        hooks: TextHooks | None,
        *,
        header: dict[str, Any],
        decode: Callable[[int], str],
        send: Callable[[FrameJob], None],
        device: torch.device,
    ) -> None:
        """Take the texts and the parts of a rank.

        Args:
            config: of the run.
            texts: of the manifest.
            rounds: division into microbatches.
            hooks: of a rank of the replica that is shown; None on others, which run the passes alone.
            header: of its frames.
            decode: text of a token.
            send: takes the results of a step.
            device: of the model.
        """
        self.microbatches, self.rounds = rounds.microbatches, rounds.rounds
        self._config = config
        self._texts = tuple(texts)
        self._division = rounds
        self._hooks = hooks
        self._header = header
        self._decode = decode
        self._send = send
        self._copier = DeviceToHostCopier(device)

    def iterator(self) -> Iterator[HostMicrobatch]:
        """Return the microbatches of all rounds."""
        return self._division.batches(self._config, self._texts)

    @contextlib.contextmanager
    def reading(self, step: int, *, perturbation: str | None = None, replicas: int = 1) -> Iterator[None]:
        """Capture all rounds inside the context after `step` steps.

        `perturbation`: digest of the recipe that was in force in the newest step. `replicas`: that a forward rank runs
        in turns.
        """
        if self._hooks is None:
            yield
            return
        self._hooks.install(replicas)
        try:
            yield
        finally:
            results = self._hooks.remove()
        if self._hooks.has_embedding:
            results += [TextResult(kind="text", text=text, header={}, values=()) for text in range(len(self._texts))]
        self._copier.before_prompts()
        copy = self._copier.send_step(lambda: _packed(results), results, self._copier.now())
        header = {**self._header, "step": step}
        if perturbation is not None:
            header[PERTURBATION] = perturbation
        self._send(TextsJob(header, results, self._texts, self._decode, copy))


def _packed(results: Sequence[TextResult]) -> PackedBuffer:
    """Return the values of all results as bytes, on the device."""
    parts = [value.contiguous().view(torch.uint8).view(-1) for result in results for value in result.values]
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    assert flat.numel() == sum(math.prod(part.shape) for part in parts)
    return PackedBuffer(layout=BufferLayout(found=(), shapes=(), dtypes=()), flat=flat)
