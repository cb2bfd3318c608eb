"""Analyses of one rank: reads sites while the engine reads their texts, and gathers the results on rank 0.

analyzer = RankAnalyzer(group)
analyzer.attach(group)  # on every rank, before the first analysis
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from megatronapp_common.scope.analysis_requests import (
    AnalysisRequest,
    AttributionRequest,
    HeadScoreRequest,
    LensRequest,
)
from megatronapp_trainer.device.host_memory import free_host_bytes
from megatronapp_trainer.device.place import sent_to
from megatronapp_trainer.hooks.forward_observer import Segment
from megatronapp_trainer.hooks.hook_collector import HookCollector
from megatronapp_trainer.hooks.prompt_reader import PromptReader
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scope.analysis.attribution import AttributionAnalysis
from megatronapp_trainer.scope.analysis.chunk_values import ChunkAnalysis, ChunkValues
from megatronapp_trainer.scope.analysis.commands import TOPIC, AnalysisCommand, BeginAnalysis
from megatronapp_trainer.scope.analysis.head_scores import HeadScoreAnalysis
from megatronapp_trainer.scope.analysis.logit_lens import LensAnalysis
from megatronapp_trainer.scope.analysis.rank_exchange import RankExchange
from megatronapp_trainer.scope.capture.rank_shard import rank_shard_of
from megatronapp_trainer.scope.capture.tracked_requests import run_of


def reserve(num_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Return memory of a device; None where so much is not free."""
    if device.type == "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8) if num_bytes < free_host_bytes() else None
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


class AnalyzedRunner(Protocol):
    """Model runner of a rank whose sites are read."""

    model: Any
    layout: Layout
    vocab_size: int

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence."""

    @property
    def keys_LZTGD(self) -> torch.Tensor:
        """Cached keys by layer, slot, position, key head and channel."""

    def logits_of(self, hidden_N1H: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of normed hidden states, on the last stage."""


class AnalyzedGroup(Protocol):
    """The ranks that compute together."""

    runner: Any
    prompt_reader: PromptReader | None

    @property
    def process_group(self) -> Any:  # noqa: ANN401 - of torch
        """The gloo group of all ranks; None for a single one."""

    def handle(self, topic: str, handler: Callable[[Any], None]) -> None:
        """Call the handler for each command of this topic, at a step boundary."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """The part of a step that is of one analysis."""

    name: str
    analysis: ChunkAnalysis
    segment: Segment
    positions: list[int]
    rows: slice
    tokens: slice


class RankAnalyzer:
    """Reader of prompts for the analyses of one rank. Used in the engine's thread only."""

    def __init__(self, group: AnalyzedGroup) -> None:
        runner: AnalyzedRunner = group.runner
        self.shard = rank_shard_of(
            runner.model, runner.layout, vocab_size=runner.vocab_size, max_length=runner.capacity
        )
        self.results: dict[str, list[list[Any]]] = {}
        """On rank 0: for each analysis that is open, the parts of all ranks of each chunk."""
        self.out_of_memory: set[str] = set()
        """Analyses that are open, for a chunk of which some rank lacked memory."""
        self._runner = runner
        self._exchange = RankExchange(runner.layout, group.process_group, self.shard.layers)
        self._collector = HookCollector(runner.model)
        self._open: dict[str, ChunkAnalysis] = {}
        self._works: list[_Work] = []
        self._workspace: torch.Tensor | None = None
        """Memory for the reading of the step, until then."""

    def attach(self, group: AnalyzedGroup) -> None:
        """Read prompts of this group and take commands of rank 0 from now on."""
        group.handle(TOPIC, self.handle)
        group.prompt_reader = self

    def handle(self, command: AnalysisCommand) -> None:
        """Begin or end an analysis; ending an unknown one does nothing."""
        if isinstance(command, BeginAnalysis):
            self._open[command.name] = self._analysis_of(command.request)
            self.results[command.name] = []
        else:
            self._open.pop(command.name, None)
            self.results.pop(command.name, None)
            self.out_of_memory.discard(command.name)

    def begin(self, segments: tuple[Segment, ...]) -> bool:
        """Hook the sites that analyses need of these tokens; false if they need none.

        Collective if they need some: an analysis for which a rank lacks memory ends here, on all ranks. Once they
        exchange values a rank that fails would leave the others waiting.
        """
        self._works = self._works_of(segments) if self._open else []
        if self._works and self._end_those_without_memory():
            self._works = self._works_of(segments)
        if not self._works:
            return False
        tokens = [
            work.tokens.start + position - work.segment.start for work in self._works for position in work.positions
        ]
        device = self._runner.keys_LZTGD.device
        tokens_U = sent_to(device, torch.tensor(tokens, dtype=torch.int64))
        some = {site.name: site for work in self._works for site in work.analysis.sites}
        whole = {site.name: site for work in self._works for site in work.analysis.whole_sites}
        self._collector.set_sites(some | whole)
        rows: Mapping[str, torch.Tensor | None] = dict.fromkeys(some, tokens_U) | dict.fromkeys(whole)
        self._collector.begin(rows, {})
        return True

    def end(self) -> None:
        """Compute the parts of this rank, and gather those of all ranks on rank 0."""
        values = self._collector.take()
        self._collector.remove()
        works, self._works = self._works, []
        self._workspace = None
        parts = [
            work.analysis.read(
                ChunkValues(
                    segment=work.segment,
                    positions=work.positions,
                    rows=work.rows,
                    tokens=work.tokens,
                    sites=values,
                )
            )
            for work in works
        ]
        gathered = self._exchange.gather(parts)
        if gathered is not None:
            for place, work in enumerate(works):
                self.results[work.name].append([parts_of_rank[place] for parts_of_rank in gathered])

    def _works_of(self, segments: tuple[Segment, ...]) -> list[_Work]:
        works, token, row = [], 0, 0
        for segment in segments:
            analysis = self._open.get(run_of(segment.request_id)[0])
            positions = [] if analysis is None else analysis.positions(segment)
            if analysis is not None and positions:
                works.append(
                    _Work(
                        name=run_of(segment.request_id)[0],
                        analysis=analysis,
                        segment=segment,
                        positions=positions,
                        rows=slice(row, row + len(positions)),
                        tokens=slice(token, token + len(segment.tokens)),
                    )
                )
                row += len(positions)
            token += len(segment.tokens)
        return works

    def _end_those_without_memory(self) -> bool:
        """Reserve the memory of the step's works; end those for which a rank lacks it. Collective."""
        device = self._runner.keys_LZTGD.device
        values: list[torch.Tensor | None] = []
        lacking = []
        for work in self._works:
            memory = work.analysis.memory(work.segment)
            workspace = self._workspace
            if workspace is None or workspace.numel() < memory.work:
                workspace = reserve(memory.work, device)
            values.append(reserve(memory.values, device))
            lacking.append(workspace is None or values[-1] is None)
            self._workspace = self._workspace if workspace is None else workspace
        names = {
            work.name for work, is_over in zip(self._works, self._exchange.any_of(lacking), strict=True) if is_over
        }
        self.out_of_memory |= names
        for name in names:
            del self._open[name]
        return bool(names)

    def _analysis_of(self, request: AnalysisRequest) -> ChunkAnalysis:
        match request:
            case LensRequest():
                return LensAnalysis(request, self.shard, self._exchange, self._unembed)
            case AttributionRequest():
                return AttributionAnalysis(request, self.shard, self._exchange, self._unembed, self._runner.model)
            case HeadScoreRequest():
                return HeadScoreAnalysis(request, self.shard, self._runner.keys_LZTGD)

    def _unembed(self, residual_RH: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of residuals, by the norm and the unembedding of the last stage."""
        normed = self._runner.model.decoder.final_layernorm(residual_RH[:, None])
        return self._runner.logits_of(normed)
