"""State of a comparison on rank 0, and the frame that reports it."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.comparison_requests import BranchState, ComparisonRequest
from megatronapp_common.scope.protocol import Tensor, build_frame
from megatronapp_trainer.inference.events import TokenEvent
from megatronapp_trainer.scope.comparison.row_results import RowResult

TextOf = Callable[[int], str]


class ComparisonRecord:
    """Tokens and rows of a comparison so far. Tokens are added in the event loop, rows in the engine's thread."""

    def __init__(
        self,
        name: str,
        body: ComparisonRequest,
        *,
        seed: int,
        prompt_tokens: int,
        recipes: Sequence[Mapping[str, Any] | None],
        started_at: str,
        text_of: TextOf | None,
    ) -> None:
        """`recipes`: digest and recipe of A and B; None: the model as it is."""
        self.name = name
        self.state: BranchState = "queued"
        self.error: dict[str, str] | None = None
        self._body = body
        self._seed = seed
        self._prompt_tokens = prompt_tokens
        self._recipes = recipes
        self._started_at = started_at
        self._text_of = text_of
        self._tokens: tuple[list[TokenEvent], list[TokenEvent]] = ([], [])
        self._rows: dict[int, RowResult] = {}
        self._lock = threading.Lock()

    def add_token(self, branch: int, event: TokenEvent) -> int:
        """Add a token that a branch chose; return the number of tokens of that branch."""
        self._tokens[branch].append(event)
        return len(self._tokens[branch])

    def add_rows(self, rows: Sequence[RowResult]) -> None:
        """Add rows that the ranks have compared."""
        with self._lock:
            self._rows |= {row.index: row for row in rows}

    def frame(self) -> Frame:
        """Return the comparison so far as a frame SCOPE_ANALYSIS (docs/scope-protocol.md, section 6)."""
        with self._lock:
            rows = dict(self._rows)
        count = max(map(len, self._tokens))
        header = {
            "kind": "comparison",
            "comparison": self.name,
            "state": self.state,
            "mode": self._body.mode,
            "prompt": self._body.prompt,
            "tokens": self._body.tokens,
            "compared": len(rows),
            "baseline": self._recipes[0],
            "perturbation": self._recipes[1],
            "firstDivergence": self._first_divergence(),
            "error": self.error,
            "startedAt": self._started_at,
            "seed": self._seed,
            "promptTokens": self._prompt_tokens,
            "top": self._body.top,
            "texts": ["".join(event.text or "" for event in events) for events in self._tokens],
            "rows": [self._row(index, rows.get(index)) for index in range(count)],
        }
        tensors = [
            Tensor(name, "f32", _by_row(list(map(rows.get, range(count))), name))
            for name in ("drift", "heads")
            if any(getattr(row, name) is not None for row in rows.values())
        ]
        return build_frame(FrameType.SCOPE_ANALYSIS, header, tensors)

    def _first_divergence(self) -> int | None:
        pairs = enumerate(zip(*self._tokens, strict=False))
        return next((index for index, (first, second) in pairs if first.token != second.token), None)

    def _row(self, index: int, row: RowResult | None) -> dict[str, Any]:
        first, second = (events[index] if index < len(events) else None for events in self._tokens)
        found = None if row is None else row.divergence
        overlap = None
        if row is not None and first is not None and second is not None:
            likeliest = ({likely.token for likely in event.candidates[: self._body.top]} for event in (first, second))
            overlap = len(set.intersection(*likeliest))
        return {
            "index": index,
            "position": self._prompt_tokens + index,
            "a": self._choice(first, None if found is None else found.logprob_b),
            "b": self._choice(second, None if row is None or first is None else _logprob_in(first, second)),
            "kl": None if found is None else finite(found.kl),
            "overlap": overlap,
            "rank": None if found is None else found.rank,
        }

    def _choice(self, event: TokenEvent | None, other: float | None) -> dict[str, Any] | None:
        if event is None:
            return None
        return {
            "id": event.token,
            "text": None if self._text_of is None else self._text_of(event.token),
            "logprob": finite(event.logprob),
            "otherLogprob": finite(other),
        }


def _logprob_in(other: TokenEvent, event: TokenEvent | None) -> float | None:
    """Return the log-probability of an event's token in the other branch, where it is among its likeliest tokens."""
    if event is None:
        return None
    known = {likely.token: likely.logprob for likely in other.candidates} | {other.token: other.logprob}
    return known.get(event.token)


def _by_row(rows: Sequence[RowResult | None], name: str) -> NDArray[np.float32]:
    """Return a quantity as [.., rows], NaN where it is not known."""
    like = next(values for row in rows if (values := getattr(row, name, None)) is not None)
    columns = [np.full_like(like, np.nan) if row is None else getattr(row, name) for row in rows]
    return np.stack(columns, -1).astype("<f4")


def finite(value: float | None) -> float | None:
    """Return a number that JSON has; None for NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None
