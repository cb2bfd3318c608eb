"""What a server counts: for /metrics, and for the progress page."""

import collections
import time
from collections.abc import Callable, Iterator, Sequence

from megatronapp_trainer.generate.events import Event, FinishedEvent, TokenEvent

WINDOW_S = 10.0
"""Time that tokens/s is a mean over."""


class Tally:
    """Counts since the start. The engine's thread writes, any thread reads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.refused = 0
        """Requests that found the queue full."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.ended: collections.Counter[str] = collections.Counter()
        """Prompts by how they ended."""
        self._now = now
        self._recent: collections.deque[tuple[float, int]] = collections.deque()

    def count(self, events: Sequence[Event]) -> None:
        """Add what a step gave."""
        tokens = sum(isinstance(event, TokenEvent) for event in events)
        for event in events:
            if isinstance(event, FinishedEvent):
                self.ended[event.reason] += 1
                self.prompt_tokens += event.prompt_tokens
        if tokens:
            self.generated_tokens += tokens
            now = self._now()
            self._recent.append((now, tokens))
            self._forget(now)

    @property
    def prompts(self) -> int:
        """Prompts that have ended."""
        return self.ended.total()

    def tokens_per_second(self) -> float:
        """Mean over the last 10 s."""
        self._forget(self._now())
        return sum(tokens for _, tokens in self._recent) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()

    def exposition(self, *, waiting: int, running: int) -> str:
        """The counts in the text format of Prometheus, version 0.0.4."""
        return "\n".join(self._lines(waiting, running)) + "\n"

    def _lines(self, waiting: int, running: int) -> Iterator[str]:
        yield from _family("megatronapp_serve_queue_length", "gauge", "Prompts that wait.", {"": waiting})
        yield from _family("megatronapp_serve_running", "gauge", "Prompts that are being generated.", {"": running})
        ended = {f'{{reason="{reason}"}}': self.ended[reason] for reason in ("stop", "length", "cancelled", "error")}
        yield from _family("megatronapp_serve_prompts_total", "counter", "Prompts that have ended.", ended)
        yield from _family(
            "megatronapp_serve_refused_total", "counter", "Requests that found the queue full.", {"": self.refused}
        )
        tokens = {'{kind="prompt"}': self.prompt_tokens, '{kind="generated"}': self.generated_tokens}
        yield from _family("megatronapp_serve_tokens_total", "counter", "Tokens read and generated.", tokens)


def _family(name: str, kind: str, text: str, values: dict[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values.items():
        yield f"{name}{labels} {value}"
