"""Samples of streamed text: documents in a row, cut into samples of one length, from a state that JSON can store."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from megatronapp_trainer.data.streaming.sources import StreamedPart, cause_of
from megatronapp_trainer.data.tokenizer import Tokenizer
from megatronapp_trainer.errors import DataError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextForm:
    """How text becomes samples."""

    flag: str
    """Flag that names the data set, for messages."""
    field: str
    """Field of the examples that holds the text."""
    sequence_length: int
    eod_mask_loss: bool
    restarts_positions: bool


class TextReader:
    """Reads a part of a data set again and again, and turns it into samples."""

    def __init__(
        self,
        open_part: Callable[[], StreamedPart],
        tokenizer: Tokenizer,
        form: TextForm,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Take a function that opens the part at its beginning; continue from a state of `state`.

        Text that spells a special token is encoded as text by the tokenizer from now on, so that it cannot forge an
        end of document.
        """
        tokenizer.backend.encode_special_tokens = True
        self._open = open_part
        self._tokenizer = tokenizer
        self._form = form
        self._part = open_part()
        self._tokens: list[int] = []
        if state is not None:
            self._tokens = list(state["tokens"])
            if state["part"] is not None:
                self._part.load_state_dict(state["part"])
        self._position: dict[str, Any] | None = None if state is None else state["part"]
        self._examples: Iterator[dict[str, Any]] | None = None
        self._restarts = 0
        """Number of restarts of the part since the last text."""
        self._nulls = 0
        """Number of examples without text that were skipped."""

    def state(self) -> dict[str, Any]:
        """Return where the next sample begins."""
        return {"part": self._position, "tokens": list(self._tokens)}

    def next_sample(self) -> dict[str, Any]:
        """Return tokens, labels and position_ids int64 [length], and loss_mask float32 [length].

        Raises:
            DataError: the part has no text, cannot be read, or an example has no field for it.
        """
        length = self._form.sequence_length
        while len(self._tokens) <= length:
            self._tokens += self._next_document()
        row = np.array(self._tokens[: length + 1], dtype=np.int64)
        del self._tokens[:length]
        return sample_of(row, self._tokenizer.eod, self._form)

    def _next_document(self) -> list[int]:
        field = self._form.field
        while (example := self._next_example()).get(field, "") is None:
            self._nulls += 1
            if self._nulls == 10 ** (len(str(self._nulls)) - 1):  # 1, 10, 100, ...
                log.warning("%s: %d examples skipped, whose %r is null", self._form.flag, self._nulls, field)
        text = example.get(field)
        self._restarts = 0
        if not isinstance(text, str):
            raise DataError(
                f"an example of {self._form.flag} has no text in the field {field!r}, but "
                f"{', '.join(example)}; name its field with --hf-text-field"
            )
        return [*self._tokenizer.tokenize(text), self._tokenizer.eod]

    def _next_example(self) -> dict[str, Any]:
        while self._restarts <= 1:
            if self._examples is None:
                self._examples = iter(self._part)
            try:
                example = next(self._examples)
            except StopIteration:
                self._part, self._examples = self._open(), None
                self._restarts += 1
                continue
            except Exception as error:  # of many libraries
                raise DataError(f"{self._form.flag} cannot be read: {cause_of(error)}") from error
            self._position = self._part.state_dict()
            return example
        raise DataError(
            f"a reader of {self._form.flag} has no examples with text; give more data, or fewer --hf-readers"
        )


def sample_of(row: np.ndarray[Any, np.dtype[np.int64]], eod: int, form: TextForm) -> dict[str, Any]:
    """Return a sample of length + 1 tokens, in which `eod` ends documents."""
    tokens, length = row[:-1], len(row) - 1
    positions = np.arange(length)
    if form.restarts_positions:
        starts = np.concatenate(([0], np.flatnonzero(tokens == eod) + 1))
        starts = starts[starts < length]
        positions -= np.repeat(starts, np.diff(np.append(starts, length)))
    mask = np.where(tokens == eod, 0.0, 1.0) if form.eod_mask_loss else np.ones(length)
    return {
        "tokens": torch.from_numpy(tokens.copy()),
        "labels": torch.from_numpy(row[1:].copy()),
        "loss_mask": torch.from_numpy(mask.astype(np.float32)),
        "position_ids": torch.from_numpy(positions),
    }
