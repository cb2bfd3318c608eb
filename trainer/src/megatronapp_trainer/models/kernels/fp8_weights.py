"""The weights of linear layers in 8 bits, rounded once for all microbatches of a step."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator

import torch

from megatronapp_trainer.models.kernels.fp8 import Quantized, quantize_columns, quantize_rows

Recorder = Callable[[Callable[[], tuple[()]]], Callable[[], object]]
"""Records a computation, as a CUDA graph, and returns what runs it again."""


class Fp8Weight:
    """A weight [N, K] in e4m3, as the products of forward and of backward passes read it.

    Within a step each form is rounded at its first use, into the same memory as in the step before, from which
    CUDA graphs read it. Outside of steps, where anything may change the weight, it is rounded at each use.
    """

    def __init__(self, weights: "Fp8Weights", parameter: torch.nn.Parameter) -> None:
        self._weights = weights
        self._parameter = parameter
        self._rows: Quantized | None = None
        self._columns: Quantized | None = None
        self._rows_of = self._columns_of = 0
        """Steps whose weight the forms are."""

    def rows(self) -> Quantized:
        """Return [N, K] with a scale for each row, for outputs."""
        if self._weights.step == 0:
            return quantize_rows(self._parameter.detach())
        if self._rows is None or self._rows_of != self._weights.step:
            self._rows = quantize_rows(self._parameter.detach(), self._rows)
            self._rows_of = self._weights.step
        return self._rows

    def columns(self) -> Quantized:
        """Return the transposed weight [K, N] with a scale for each of its rows, for gradients of inputs."""
        if self._weights.step == 0:
            return quantize_columns(self._parameter.detach())
        if self._columns is None or self._columns_of != self._weights.step:
            self._columns = quantize_columns(self._parameter.detach(), self._columns)
            self._columns_of = self._weights.step
        return self._columns

    @property
    def forms(self) -> int:
        """Return the number of forms that passes have used."""
        return (self._rows is not None) + (self._columns is not None)

    @property
    def is_rounded(self) -> bool:
        """Return True if this step has rounded one of the forms."""
        return self._weights.step in {self._rows_of, self._columns_of}

    def round_again(self) -> None:
        """Round the forms that passes have used before, unless this step has done so."""
        if self._rows is not None:
            self.rows()
        if self._columns is not None:
            self.columns()

    def compute(self) -> None:
        """Round these forms into their memory, without a note that this step has done so."""
        if self._rows is not None:
            quantize_rows(self._parameter.detach(), self._rows)
        if self._columns is not None:
            quantize_columns(self._parameter.detach(), self._columns)

    def note_computed(self) -> None:
        """Note that this step has rounded these forms."""
        if self._rows is not None:
            self._rows_of = self._weights.step
        if self._columns is not None:
            self._columns_of = self._weights.step


@dataclasses.dataclass(frozen=True, slots=True)
class _RecordedRounding:
    replay: Callable[[], object]
    forms: int
    """Number of forms that it rounds; passes may have used more since."""


class Fp8Weights:
    """The weights in 8 bits of a rank's linear layers, two bytes for each of their numbers."""

    def __init__(self, layers: Collection[int]) -> None:
        """Take the numbers of the transformer layers that multiply in 8 bits, from 1 over all stages."""
        self.layers = layers
        self.step = 0
        """Number of the step within which passes run; 0 outside of steps."""
        self._steps = 0
        self._weights: dict[int, list[Fp8Weight]] = {}
        """By model chunk."""
        self._rounded_of: dict[int, int] = {}
        self._recorded: dict[int, _RecordedRounding] = {}

    def add(self, chunk: int, parameter: torch.nn.Parameter) -> Fp8Weight:
        """Return the forms of a weight of a chunk."""
        weight = Fp8Weight(self, parameter)
        self._weights.setdefault(chunk, []).append(weight)
        return weight

    @contextlib.contextmanager
    def constant(self) -> Iterator[None]:
        """Within the context no weight changes, once it has been gathered for its first use."""
        self._steps += 1
        self.step = self._steps
        try:
            yield
        finally:
            self.step = 0

    @torch.no_grad()
    def prepare(self, chunk: int) -> None:
        """Round what passes of a chunk have read in earlier steps, for CUDA graphs, which do not round weights."""
        if self._rounded_of.get(chunk) == self.step:
            return
        weights, recorded = self._weights.get(chunk, []), self._recorded.get(chunk)
        if (
            recorded is not None
            and recorded.forms == _forms(weights)
            and not any(weight.is_rounded for weight in weights)
        ):
            recorded.replay()
            for weight in weights:
                weight.note_computed()
        else:
            for weight in weights:
                weight.round_again()
        self._rounded_of[chunk] = self.step

    @torch.no_grad()
    def record(self, chunk: int, recorder: Recorder) -> None:
        """Record what `prepare` does from the next step on: hundreds of launches, for which the device would wait.

        Call it after `prepare`, where passes are recorded, too.
        """
        weights, recorded = self._weights.get(chunk, []), self._recorded.get(chunk)
        forms = _forms(weights)
        if forms == 0 or (recorded is not None and recorded.forms == forms):
            return

        def compute() -> tuple[()]:
            for weight in weights:
                weight.compute()
            return ()

        self._recorded[chunk] = _RecordedRounding(recorder(compute), forms)


def _forms(weights: Collection[Fp8Weight]) -> int:
    return sum(weight.forms for weight in weights)
