"""Statistics of a server, for /metrics and for the progress document."""

import bisect
import collections
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from megatronapp_trainer.inference.events import Event, FinishedEvent, TokenEvent

WINDOW_S = 10.0
"""Seconds over which tokens/s is a mean."""
SUCCEEDED = ("stop", "length")
REASONS = (*SUCCEEDED, "cancelled", "error")
WAIT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class DurationHistogram:
    """Counts of durations by size. One thread writes, any thread reads."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Add one duration, in seconds."""
        self._counts[bisect.bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """Return the metric for Prometheus: cumulative counts, each by its upper bound."""
        found, total = HistogramMetricFamily(name, text), 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), list(self._counts), strict=True):
            total += count
            buckets.append((bound, total))
        found.add_metric([], buckets=buckets, sum_value=self._sum)
        return found


class ServerStatistics:
    """Counts since the start. The engine's thread writes, except `submitted`; any thread reads."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.refused = 0
        """Requests that found the queue full."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.ended: collections.Counter[str] = collections.Counter()
        """Prompts by how they ended."""
        self.queue_s = DurationHistogram(WAIT_BUCKETS_S)
        self.first_token_s = DurationHistogram(WAIT_BUCKETS_S)
        self.token_gap_s = DurationHistogram(TOKEN_BUCKETS_S)
        self.request_s = DurationHistogram(REQUEST_BUCKETS_S)
        self._now = now
        self._recent: collections.deque[tuple[float, int]] = collections.deque()
        self._submitted_at: dict[str, float] = {}
        """Time at which each open prompt was received."""
        self._token_at: dict[str, float] = {}
        """Time of the newest token of each open prompt."""

    def submitted(self, request_ids: Iterable[str]) -> None:
        """Start the waiting time of these prompts. Probes are not submitted here, and not counted."""
        now = self._now()
        self._submitted_at.update(dict.fromkeys(request_ids, now))

    def refuse(self, request_ids: Iterable[str]) -> None:
        """Forget these prompts, which were refused."""
        for request_id in request_ids:
            self._submitted_at.pop(request_id, None)

    def admitted(self, request_id: str) -> None:
        """End the waiting time of this prompt."""
        if (since := self._submitted_at.get(request_id)) is not None:
            self.queue_s.add(self._now() - since)

    def count(self, events: Sequence[Event]) -> None:
        """Add the events of a step."""
        now = self._now()
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        for token in tokens:
            self._time(token, now)
        for event in events:
            if isinstance(event, FinishedEvent):
                self._end(event, now)
        if tokens:
            self.generated_tokens += len(tokens)
            self._recent.append((now, len(tokens)))
            self._forget(now)

    @property
    def prompts(self) -> int:
        """Return the number of prompts that have ended."""
        return self.ended.total()

    def tokens_per_second(self) -> float:
        """Return the mean over the last WINDOW_S seconds."""
        self._forget(self._now())
        return sum(tokens for _, tokens in self._recent) / WINDOW_S

    def exposition(self, *, waiting: int, running: int) -> bytes:
        """Return the counts in the text format of Prometheus, version 0.0.4."""
        registry = CollectorRegistry()
        registry.register(_StatisticsCollector(self, waiting=waiting, running=running))
        return generate_latest(registry)

    def _time(self, event: TokenEvent, now: float) -> None:
        if (since := self._submitted_at.get(event.request_id)) is None:
            return  # a probe
        if (before := self._token_at.get(event.request_id)) is None:
            self.first_token_s.add(now - since)
        else:
            self.token_gap_s.add(now - before)
        self._token_at[event.request_id] = now

    def _end(self, event: FinishedEvent, now: float) -> None:
        self._token_at.pop(event.request_id, None)
        if (since := self._submitted_at.pop(event.request_id, None)) is None:
            return  # a probe
        self.ended[event.reason] += 1
        self.prompt_tokens += event.prompt_tokens
        if event.reason in SUCCEEDED:
            self.request_s.add(now - since)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()


class _StatisticsCollector(Collector):
    """Exports the statistics as metrics."""

    def __init__(self, statistics: ServerStatistics, *, waiting: int, running: int) -> None:
        self._statistics, self._waiting, self._running = statistics, waiting, running

    def collect(self) -> Iterator[Metric]:
        """Yield all families of metrics."""
        statistics = self._statistics
        name = "megatronapp_serve_{}".format
        yield GaugeMetricFamily(name("num_requests_waiting"), "Prompts that wait.", self._waiting)
        yield GaugeMetricFamily(name("num_requests_running"), "Prompts that are being generated.", self._running)
        ended = CounterMetricFamily(name("requests"), "Prompts that have ended.", labels=("finished_reason",))
        for reason in REASONS:
            ended.add_metric([reason], statistics.ended[reason])
        yield ended
        yield CounterMetricFamily(name("refused"), "Requests that found the queue full.", float(statistics.refused))
        yield CounterMetricFamily(name("prompt_tokens"), "Tokens of prompts.", float(statistics.prompt_tokens))
        yield CounterMetricFamily(name("generation_tokens"), "Generated tokens.", float(statistics.generated_tokens))
        yield statistics.queue_s.family(name("request_queue_time_seconds"), "Time of a prompt in the queue.")
        yield statistics.first_token_s.family(
            name("time_to_first_token_seconds"), "Time from a request to its first token, for each prompt."
        )
        yield statistics.token_gap_s.family(
            name("inter_token_latency_seconds"), "Time from one token of a prompt to the next."
        )
        yield statistics.request_s.family(
            name("e2e_request_latency_seconds"), "Time from a request to the end of its text, for each that was whole."
        )
