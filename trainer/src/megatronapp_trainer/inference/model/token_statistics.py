"""Statistics of the distributions that tokens were chosen from, computed and copied during the next step.

Generation does not need these numbers, so it does not wait for them: on a GPU they are made on a separate stream.
Shapes as in `sampling`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from megatronapp_common.scope.protocol import TEMPERATURES
from megatronapp_trainer.device.compiling import can_compile
from megatronapp_trainer.device.cuda_graphs import GraphCache
from megatronapp_trainer.device.place import HostCopy, sent_to

Numbers: TypeAlias = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStatistics:
    """Statistics of a whole distribution; nothing filtered."""

    entropy: float
    """Entropy at temperature 1, in nats."""
    partition: Numbers
    """Logarithm of the sum of exp(logit / t), for each t of `megatronapp_common.scope.protocol.TEMPERATURES`."""
    tokens: Numbers
    """Tokens in order of probability, from the likeliest on; whole numbers."""
    logprobs: Numbers

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def ready(self) -> bool:
        """Return true: they are on the host."""
        return True

    def get(self) -> "TokenStatistics":
        """Return the statistics themselves."""
        return self


class PendingStatistics(Protocol):
    """Statistics that are being computed."""

    @property
    def count(self) -> int:
        """Return the number of tokens."""

    def ready(self) -> bool:
        """Return true if `get` does not wait."""

    def get(self) -> TokenStatistics:
        """Return the statistics; waits for the device until they are ready. From any thread."""


class PaddedLogits:
    """Copy of logits in fp32 at a fixed address, which CUDA graphs read."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._logits: torch.Tensor | None = None

    def copied(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Copy at most `rows` rows; return the first rows, a power of two of them, so that few graphs are needed."""
        count, vocabulary = logits_RV.shape
        if self._logits is None:
            self._logits = torch.zeros((power(self._rows), vocabulary), device=logits_RV.device)
        self._logits[:count].copy_(logits_RV)
        return self._logits[: power(count)]


class StatisticsLauncher:
    """Launcher of statistics, of `rows` rows at a time, on one device, as CUDA graphs if `graphs`."""

    def __init__(self, *, rows: int, graphs: bool = False) -> None:
        self._graphs = GraphCache(enabled=graphs)
        self._rows = rows
        self._logits = PaddedLogits(rows)
        self._stream: torch.cuda.Stream | None = None
        self._inverse_T: torch.Tensor | None = None
        """1 / `TEMPERATURES` on the device, for the kernel that reads them."""

    def launch(self, logits_RV: torch.Tensor, candidates: Sequence[int]) -> list[PendingStatistics | None]:
        """Launch statistics of each row with that many likeliest tokens; None where it is 0. Waits for nothing."""
        rows = [row for row, count in enumerate(candidates) if count]
        if not rows:
            return [None] * len(candidates)
        if len(rows) < len(candidates):
            logits_RV = logits_RV.index_select(0, sent_to(logits_RV.device, torch.tensor(rows)))
        most = min(power(max(candidates)), logits_RV.size(1))
        tables = [self._table(block, most) for block in torch.split(logits_RV, self._rows)]
        places = {row: divmod(place, self._rows) for place, row in enumerate(rows)}
        return [
            _StatisticsRow(tables[places[row][0]], places[row][1], count) if count else None
            for row, count in enumerate(candidates)
        ]

    def _table(self, logits_RV: torch.Tensor, most: int) -> "_StatisticsTable":
        """Launch the measures of at most `rows` rows, which fit into memory; a prompt that is scored has more."""
        if logits_RV.is_cuda:
            return self._launch_on_copy(logits_RV, most)
        return _StatisticsTable(HostCopy(_columns(logits_RV.float(), most), is_cuda=False), most)

    def _launch_on_copy(self, logits_RV: torch.Tensor, most: int) -> "_StatisticsTable":
        """Launch the measures of a copy of the logits, because the next step writes over them."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(logits_RV.device)  # type: ignore[no-untyped-call] # torch's own gap
            if can_compile():
                self._inverse_T = torch.tensor([1 / each for each in TEMPERATURES], device=logits_RV.device)
        torch.cuda.current_stream().wait_stream(self._stream)  # this stream may still read the copy of the last step
        count = logits_RV.size(0)
        copy_RV = self._logits.copied(logits_RV)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            key = copy_RV.size(0), most
            columns = self._graphs.run(None, key, lambda: _columns(copy_RV, most, self._inverse_T))[:count]
            return _StatisticsTable(HostCopy(columns, is_cuda=True), most)


def power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


@dataclasses.dataclass(frozen=True, slots=True)
class _StatisticsTable:
    """The measures of all rows of a step."""

    columns: HostCopy
    most: int

    def measures(self, row: int, count: int) -> TokenStatistics:
        numbers, most = self.columns.read().numpy()[row], self.most
        return TokenStatistics(
            tokens=numbers[:count],
            logprobs=numbers[most : most + count],
            entropy=float(numbers[2 * most]),
            partition=numbers[2 * most + 1 :],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _StatisticsRow:
    """One row of a table."""

    table: _StatisticsTable
    row: int
    count: int

    def ready(self) -> bool:
        return self.table.columns.ready()

    def get(self) -> TokenStatistics:
        return self.table.measures(self.row, self.count)


def _columns(logits_RV: torch.Tensor, most: int, inverse_T: torch.Tensor | None = None) -> torch.Tensor:
    """Return fp64, which holds tokens exactly: [R, tokens, their log-probabilities, entropy, partition sums].

    `inverse_T`: 1 / `TEMPERATURES` on the device, where a kernel computes the sums.
    """
    best_RK, token_RK = logits_RV.topk(most, dim=1)
    if inverse_T is None:
        total_R1 = logits_RV.logsumexp(1, keepdim=True)
        rest = (_entropy(logits_RV, total_R1), _partition(logits_RV))
    else:
        from megatronapp_trainer.inference.model import distribution_kernels

        sums = distribution_kernels.sums(logits_RV, inverse_T)
        total_R1, rest = sums[:, :1], (sums[:, 1:2], sums[:, 2:])
    return torch.cat([part.double() for part in (token_RK, best_RK - total_R1, *rest)], 1)


def _entropy(logits_RV: torch.Tensor, total_R1: torch.Tensor) -> torch.Tensor:
    """Return the entropy [R, 1] in nats."""
    logs_RV = logits_RV - total_R1
    return -(logs_RV.exp() * logs_RV).sum(1, keepdim=True)


def _partition(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return [R, temperatures]; computed in sequence, since all together take many times the memory of the logits."""
    return torch.stack([(logits_RV * (1 / temperature)).logsumexp(1) for temperature in TEMPERATURES], 1)
