"""Hooks that read probe texts in forward passes: norms of the residual, attention maps, predictions.

Shapes: S sequence, B samples of a microbatch, T tokens of a text, H query and G key heads of this rank, D channels
of a head, P blocks of tokens, V vocabulary of this rank, K candidates.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_common.scope.layer_statistics import NO_LAYER
from megatronapp_common.scope.probe_texts import CANDIDATES, Kind, block_of, blocks_of
from megatronapp_trainer.scope.capture.attention_recompute import AttentionRule, probabilities
from megatronapp_trainer.scope.statistics.site_hooks import model_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextResult:
    """Numbers of a text on this rank; `header` says of what."""

    kind: Kind
    text: int
    header: Mapping[str, Any]
    values: tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of this rank in what it captures."""

    tensor_rank: int
    tensor_size: int
    sequence_parallel: bool
    vocab_size: int
    """Number of tokens before padding."""
    tensor_group: Any
    """Process group; None with one rank."""


class TextHooks:
    """Hooks of a rank's chunks, installed while it reads probe texts."""

    def __init__(self, chunks: Sequence[Any], core_config: Any, place: Place, texts: Sequence[Sequence[int]]) -> None:  # noqa: ANN401
        """Take megatron-core's models, wrapped or not, their TransformerConfig, and the tokens of each text."""
        self._models = [model_of(chunk) for chunk in chunks]
        self._place = place
        self._texts = tuple(torch.tensor(tokens) for tokens in texts)
        self._lengths = tuple(map(len, texts))
        window = core_config.window_size
        self._rule = AttentionRule(
            scale=1.0 / math.sqrt(core_config.kv_channels), window=None if window is None else window[0]
        )
        self._handles: list[Any] = []
        self._results: list[TextResult] = []
        self._passes: dict[int, int] = {}
        """Forward passes of each module so far."""
        self._replicas = 1

    @property
    def has_embedding(self) -> bool:
        """Return True on the rank that names the tokens."""
        return self._place.tensor_rank == 0 and any(hasattr(model, "embedding") for model in self._inputs())

    def install(self, replicas: int) -> None:
        """Read the texts in all forward passes until `remove`; of `replicas` that take turns, the first."""
        self._replicas = replicas
        self._results, self._passes = [], {}
        for model in self._inputs():
            self._hook(model.embedding, self._residual(NO_LAYER))
        for model in self._models:
            for layer in model.decoder.layers:
                number = layer.layer_number - 1
                self._hook(layer, self._residual(number))
                self._hook(layer.self_attention.core_attention, self._attention(number))
            if model.post_process:
                self._hook(model.output_layer, self._predictions)

    def remove(self) -> list[TextResult]:
        """Remove the hooks; returns what was read, on the device."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        results, self._results = self._results, []
        return results

    def _inputs(self) -> list[Any]:
        return [model for model in self._models if model.pre_process]

    def _hook(self, module: torch.nn.Module, read: Callable[[int, int, Any, Any], None]) -> None:
        def hook(_module: object, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:  # noqa: ANN401
            given = (*inputs, *keywords.values())
            for text, row in self._texts_of(module, given, output):
                with torch.no_grad():
                    read(text, row, given, output)

        self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def _texts_of(self, module: torch.nn.Module, given: tuple[Any, ...], output: Any) -> Iterator[tuple[int, int]]:  # noqa: ANN401
        """Yield the texts of this pass of a module, each with its row in the microbatch."""
        done = self._passes.get(id(module), 0)
        self._passes[id(module)] = done + 1
        microbatch, replica = divmod(done, self._replicas)
        if replica:
            return
        rows = _tensor(output).size(1)
        for row in range(rows):
            text = microbatch * rows + row
            if text < len(self._lengths):
                yield text, row

    def _residual(self, layer: int) -> Callable[[int, int, Any, Any], None]:
        place = self._place

        def read(text: int, row: int, _given: Any, output: Any) -> None:  # noqa: ANN401
            if place.tensor_rank and not place.sequence_parallel:
                return
            hidden_SH = _tensor(output)[:, row]
            first = place.tensor_rank * hidden_SH.size(0) if place.sequence_parallel else 0
            count = min(hidden_SH.size(0), self._lengths[text] - first)
            if count > 0:
                norms = torch.linalg.vector_norm(hidden_SH[:count].float(), dim=-1)
                self._add("norms", text, {"layer": layer, "first": first}, norms)

        return read

    def _attention(self, layer: int) -> Callable[[int, int, Any, Any], None]:
        def read(text: int, row: int, given: Any, _output: Any) -> None:  # noqa: ANN401
            length = self._lengths[text]
            query_QHD, keys_TGD = (part[:length, row] for part in given[:2])
            positions_1Q = torch.arange(length, device=query_QHD.device)[None]
            chances_HQT = probabilities(query_QHD[None, None], keys_TGD[None, None], positions_1Q, self._rule)[0, 0]
            header = {"layer": layer, "first": self._place.tensor_rank * chances_HQT.size(0)}
            self._add("attention", text, header, pooled(chances_HQT))

        return read

    def _predictions(self, text: int, row: int, _given: Any, output: Any) -> None:  # noqa: ANN401
        logits_TV = _tensor(output)[: self._lengths[text], row].float()
        followers_T = self._texts[text].roll(-1).to(logits_TV.device)
        found = predictions(logits_TV, followers_T, self._place)
        if self._place.tensor_rank == 0:
            self._add("predictions", text, {}, *found)

    def _add(self, kind: Kind, text: int, header: Mapping[str, Any], *values: torch.Tensor) -> None:
        self._results.append(TextResult(kind=kind, text=text, header=header, values=values))


def _tensor(output: Any) -> torch.Tensor:  # noqa: ANN401 - of a module
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def pooled(chances_HQT: torch.Tensor) -> torch.Tensor:
    """Return uint8 [H, P, P]: the mean over the queries of a block of the sum over its keys."""
    heads, length, _ = chances_HQT.shape
    block, blocks = block_of(length), blocks_of(length)
    missing = block * blocks - length
    filled = torch.nn.functional.pad(chances_HQT, (0, missing, 0, missing)).view(heads, blocks, block, blocks, block)
    queries_P = torch.full((blocks, 1), block, device=filled.device)
    queries_P[-1] -= missing
    return (filled.sum((2, 4)) / queries_P * 255).round().to(torch.uint8)


def predictions(
    logits_TV: torch.Tensor, followers_T: torch.Tensor, place: Place
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return fp32 [T] log-probabilities of the tokens that follow, int32 [T, K] and fp32 [T, K] the likeliest tokens.

    Collective over the tensor group: the sum of the exponentials and the candidates of each part of the vocabulary.
    """
    first = place.tensor_rank * logits_TV.size(1)
    ids_V = torch.arange(first, first + logits_TV.size(1), device=logits_TV.device)
    logits_TV = logits_TV.masked_fill(ids_V >= place.vocab_size, -math.inf)
    own_T = followers_T - first
    is_here_T = (own_T >= 0) & (own_T < logits_TV.size(1))
    followers = logits_TV.gather(1, own_T.clamp(0, logits_TV.size(1) - 1)[:, None])
    best = logits_TV.topk(min(CANDIDATES, logits_TV.size(1)))
    own = torch.cat(
        (
            logits_TV.logsumexp(1, keepdim=True),
            followers.masked_fill(~is_here_T[:, None], -math.inf),
            best.values,
            (best.indices + first).float(),  # exact: a vocabulary has fewer than 2^24 tokens
        ),
        1,
    )
    parts = [own]
    if place.tensor_size > 1:
        parts = [torch.empty_like(own) for _ in range(place.tensor_size)]
        dist.all_gather(parts, own.contiguous(), group=place.tensor_group)
    count = best.values.size(1)
    columns = zip(*(torch.split(part, [1, 1, count, count], 1) for part in parts), strict=True)
    sums, followers_of, values, ids = (torch.cat(column, 1) for column in columns)
    total_T1 = sums.logsumexp(1, keepdim=True)
    chosen = values.topk(min(CANDIDATES, values.size(1)))
    return (
        followers_of.amax(1) - total_T1[:, 0],
        ids.gather(1, chosen.indices).to(torch.int32),
        chosen.values - total_T1,
    )
