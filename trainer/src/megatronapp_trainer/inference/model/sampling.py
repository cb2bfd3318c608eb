"""Choice of tokens from logits: temperature, top-k, top-p, and noise that depends on seed and position alone.

Shapes: R positions, V vocabulary, K candidates.

A token is drawn by the Gumbel-max rule (Gumbel 1954; Maddison, Tarlow and Minka 2014): the largest of logit plus noise
has the distribution of the softmax. The noise of a token is a hash of (seed, position, token), so a request gives the
same tokens in every batch and layout, but for ties within rounding.
"""

import dataclasses
import hashlib

import torch

from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.device.place import HostCopy, sent_to
from megatronapp_trainer.inference.model.token_statistics import (
    PaddedLogits,
    PendingStatistics,
    StatisticsLauncher,
    power,
)
from megatronapp_trainer.inference.step_plan import OutputRequest, SamplingParams

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1
_UNITS = 2.0**40
"""Units of a probability in sums."""
_MOST_GRAPHED = 16
"""Most rows whose tokens are chosen in a CUDA graph: of more rows the kernels themselves take longer than launches."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenCandidate:
    """A token and its log-probability under the model (temperature 1, nothing filtered)."""

    token: int
    logprob: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampledOutput:
    """Answer to one `OutputRequest`."""

    token: int
    logprob: float
    candidates: tuple[TokenCandidate, ...]
    logits: torch.Tensor | None
    measures: PendingStatistics | None = None


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Return two keys of 32 bits for the token at this position of its sequence."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def gumbel_noise(keys_R2: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return fp32 [R, V] of Gumbel noise from int64 keys. Mixes with the finaliser of MurmurHash3 (Appleby)."""
    index_V = torch.arange(vocab_size, device=keys_R2.device) * _GOLDEN
    bits_RV = _mixed(_mixed((index_V + keys_R2[:, :1]) & _MASK) ^ keys_R2[:, 1:])
    uniform_RV = (bits_RV.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform_RV)).float()


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _MASK
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _MASK
    return bits ^ (bits >> 16)


def choose(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    keys_R2: torch.Tensor,
    *,
    filters: bool,
) -> torch.Tensor:
    """Choose int64 [R], a token per row of fp32 logits. Temperature 0 takes the likeliest, top_k 0 and top_p 1 all.

    `filters`: some row has a top_k or top_p, for which the vocabulary is sorted.
    """
    scaled_RV = logits_RV / temperature_R.clamp_min(1e-3)[:, None]
    noise_RV = gumbel_noise(keys_R2, logits_RV.size(1))
    if not filters:
        drawn_R = (scaled_RV + noise_RV).argmax(1)
    else:
        ordered_RV, order_RV = scaled_RV.sort(dim=1, descending=True, stable=True)
        allowed_RV = _sampling_mask(ordered_RV, top_k_R, top_p_R)
        scores_RV = torch.where(allowed_RV, ordered_RV + noise_RV.gather(1, order_RV), float("-inf"))
        drawn_R = order_RV.gather(1, scores_RV.argmax(1, keepdim=True)).squeeze(1)
    return torch.where(temperature_R == 0, logits_RV.argmax(1), drawn_R)


def _sampling_mask(ordered_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Return which of the logits, sorted from the largest on, may be drawn. The first one always may."""
    place_V = torch.arange(ordered_RV.size(1), device=ordered_RV.device)
    allowed_RV = (top_k_R[:, None] == 0) | (place_V < top_k_R[:, None])
    probability_RV = torch.where(allowed_RV, ordered_RV, float("-inf")).softmax(1)
    # Whole numbers, because a GPU adds floats in an order that changes, and tensor ranks must allow the same tokens.
    units_RV = (probability_RV.double() * _UNITS).long()
    before_RV = units_RV.cumsum(1) - units_RV
    # Rounded sums may reach top_p 1 before the last token, which all are kept for.
    nucleus_RV = (before_RV < (top_p_R.double() * _UNITS)[:, None]) | (top_p_R >= 1)[:, None]
    return allowed_RV & (nucleus_RV | (place_V == 0))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PendingOutputs:
    """Answers of a step that the device computes."""

    outputs: tuple[OutputRequest, ...]
    token_R: torch.Tensor
    """Chosen tokens on the device, int64."""
    table: HostCopy
    logits: HostCopy | None
    """Logits [R, V], if some output requests them."""
    measures: list[PendingStatistics | None]

    def read(self, idle_window: IdleWindow) -> tuple[SampledOutput, ...]:
        """Return the answers; waits for the device in the idle window."""
        with idle_window:
            table = self.table.read().tolist()
        logits = [None] * len(table) if self.logits is None else self.logits.read().unbind()
        return tuple(
            _reading(output, row, logits_V, measures)
            for output, row, logits_V, measures in zip(self.outputs, table, logits, self.measures, strict=True)
        )


class OutputLauncher:
    """Launcher of the answers of steps of up to `rows` sequences; those of few outputs as CUDA graphs if `graphs`.

    They take dozens of small kernels, each of which takes the host longer to launch than the device to run.
    """

    def __init__(self, *, rows: int, graphs: bool = False) -> None:
        self._rows = min(rows, _MOST_GRAPHED)
        self._graphs = GraphCache(enabled=graphs)
        self._measurer = StatisticsLauncher(rows=rows, graphs=graphs)
        self._logits = PaddedLogits(self._rows)
        self._table: torch.Tensor | None = None
        """Sampling parameters that the graphs read."""

    def launch(self, logits_RV: torch.Tensor, outputs: tuple[OutputRequest, ...]) -> PendingOutputs:
        """Launch the answers for these positions; waits for nothing. The logits may be overwritten afterwards.

        The next launch overwrites the tokens on the device.
        """
        token_R, columns = self._chosen(logits_RV, outputs)
        table = HostCopy(columns, is_cuda=logits_RV.is_cuda)  # others may use the device meanwhile
        needs_logits = any(output.logits for output in outputs)
        return PendingOutputs(
            outputs=outputs,
            token_R=token_R,
            table=table,
            logits=HostCopy(logits_RV.float().clone(), is_cuda=logits_RV.is_cuda) if needs_logits else None,
            measures=self._measurer.launch(logits_RV, [output.measures for output in outputs]),
        )

    def tokens(self, logits_RV: torch.Tensor, outputs: tuple[OutputRequest, ...]) -> torch.Tensor:
        """Return the chosen tokens alone, as `PendingOutputs.token_R`."""
        return self._chosen(logits_RV, outputs)[0]

    def _chosen(self, logits_RV: torch.Tensor, outputs: tuple[OutputRequest, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens, int64 [R], and what is reported of them, fp64 [R, columns]."""
        most = max(output.candidates for output in outputs)
        most = min(power(most), logits_RV.size(1)) if most else 0
        if len(outputs) > self._rows or any(output.target is not None for output in outputs):
            logits_RV = logits_RV.float()
            token_R = _tokens(logits_RV, outputs)
            return token_R, _columns(logits_RV, token_R, most)
        samplings = [output.sampling for output in outputs]
        is_drawn, filters = _is_drawn(samplings), _has_filters(samplings, logits_RV.size(1))
        count, read_PV = len(outputs), self._logits.copied(logits_RV)
        table_P5 = self._copied_table(samplings, read_PV) if is_drawn else None

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            token_P = read_PV.argmax(1) if table_P5 is None else _drawn(read_PV, table_P5, filters=filters)
            return token_P, _columns(read_PV, token_P, most)

        token_P, columns = self._graphs.run(None, (read_PV.size(0), is_drawn, filters, most), compute)
        return token_P[:count], columns[:count]

    def _copied_table(self, samplings: list[SamplingParams | None], read_PV: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            self._table = torch.zeros((power(self._rows), _PARAMETERS), dtype=torch.float64, device=read_PV.device)
        self._table[: len(samplings)].copy_(sent_to(read_PV.device, _parameters(samplings)))
        return self._table[: read_PV.size(0)]


def _columns(logits_RV: torch.Tensor, token_R: torch.Tensor, most: int) -> torch.Tensor:
    """Return fp64, which holds tokens exactly: [R, token and log-probability, then `most` of both]."""
    total_R1 = logits_RV.logsumexp(1, keepdim=True)
    columns = [token_R[:, None].double(), (logits_RV.gather(1, token_R[:, None]) - total_R1).double()]
    if most:
        best_RK, best_token_RK = logits_RV.topk(most, dim=1)
        columns += [best_token_RK.double(), (best_RK - total_R1).double()]
    return torch.cat(columns, 1)


def _reading(
    output: OutputRequest, row: list[float], logits_V: torch.Tensor | None, measures: PendingStatistics | None
) -> SampledOutput:
    """Read `row`: token, log-probability, then candidates and their log-probabilities."""
    most = len(row) // 2 - 1
    pairs = list(zip(row[2 : 2 + most], row[2 + most :], strict=True))[: output.candidates]
    return SampledOutput(
        token=int(row[0]),
        logprob=row[1],
        candidates=tuple(TokenCandidate(token=int(token), logprob=logprob) for token, logprob in pairs),
        logits=logits_V.clone() if output.logits and logits_V is not None else None,
        measures=measures,
    )


def _tokens(logits_RV: torch.Tensor, outputs: tuple[OutputRequest, ...]) -> torch.Tensor:
    """Return int64 [R] of fp32 logits: the target if the request has one, otherwise the chosen token."""
    free = [row for row, output in enumerate(outputs) if output.target is None]
    if len(free) == len(outputs):
        return _free_tokens(logits_RV, [output.sampling for output in outputs])
    token_R = sent_to(logits_RV.device, torch.tensor([output.target or 0 for output in outputs]))
    if free:  # of a prompt that is scored this is one row of many, and noise for all of them takes gigabytes
        rows_F = sent_to(logits_RV.device, torch.tensor(free))
        token_R[rows_F] = _free_tokens(logits_RV.index_select(0, rows_F), [outputs[row].sampling for row in free])
    return token_R


def _free_tokens(logits_RV: torch.Tensor, samplings: list[SamplingParams | None]) -> torch.Tensor:
    """Return int64 [R]: a token for each row."""
    if not _is_drawn(samplings):
        return logits_RV.argmax(1)
    table_R5 = sent_to(logits_RV.device, _parameters(samplings))
    return _drawn(logits_RV, table_R5, filters=_has_filters(samplings, logits_RV.size(1)))


def _is_drawn(samplings: list[SamplingParams | None]) -> bool:
    return any(sampling is not None and sampling.temperature > 0 for sampling in samplings)


def _has_filters(samplings: list[SamplingParams | None], vocab_size: int) -> bool:
    return any(
        sampling is not None and (0 < sampling.top_k < vocab_size or sampling.top_p < 1) for sampling in samplings
    )


_LIKELIEST = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, noise=(0, 0))
_PARAMETERS = 5


def _parameters(samplings: list[SamplingParams | None]) -> torch.Tensor:
    """Return fp64 [R, 5], which holds a key of 32 bits exactly: all parameters cross to the device in one copy."""
    chosen = [sampling or _LIKELIEST for sampling in samplings]
    rows = [(settings.temperature, settings.top_k, settings.top_p, *settings.noise) for settings in chosen]
    return torch.tensor(rows, dtype=torch.float64)


def _drawn(logits_RV: torch.Tensor, table_R5: torch.Tensor, *, filters: bool) -> torch.Tensor:
    return choose(
        logits_RV,
        table_R5[:, 0].float(),
        table_R5[:, 1].long(),
        table_R5[:, 2].float(),
        table_R5[:, 3:].long(),
        filters=filters,
    )
