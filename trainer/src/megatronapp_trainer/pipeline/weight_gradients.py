"""Weight gradients that run later than the gradients of their layers' inputs: the task W of a microbatch.

T tokens of a microbatch, I inputs and O outputs of a linear layer on this rank.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatronapp_trainer.errors import TaskOrderError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightProduct:
    """Operands of the weight gradient of one linear layer, [O, T] times [T, I]."""

    weight: torch.nn.Parameter
    input: torch.Tensor
    """[.., I] as the layer received it: under sequence parallelism this rank's part of the sequence."""
    output_gradient: torch.Tensor
    """[T, O], contiguous."""
    gather_group: dist.ProcessGroup | None
    """Ranks that hold the other parts of the input; None if it is whole."""
    versions: tuple[int, int]
    """torch's counts of writes into the two tensors when they were collected."""

    @property
    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield the memory that the operands keep alive."""
        yield self.input.untyped_storage()
        yield self.output_gradient.untyped_storage()


def weight_product(
    weight: torch.nn.Parameter,
    layer_input: torch.Tensor,
    output_gradient: torch.Tensor,
    gather_group: dist.ProcessGroup | None,
) -> WeightProduct:
    """Take the operands of a weight gradient: the gradient of the output [.., O] as a contiguous matrix."""
    matrix = output_gradient.contiguous().flatten(0, -2)
    return WeightProduct(
        weight=weight,
        input=layer_input,
        output_gradient=matrix,
        gather_group=gather_group,
        versions=(layer_input._version, matrix._version),
    )


def start_gather(
    part: torch.Tensor, group: dist.ProcessGroup, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to gather the parts of a sequence [S / ranks, ..] into `whole` [S, ..], by default a new tensor."""
    if whole is None:
        whole = part.new_empty((part.size(0) * group.size(), *part.shape[1:]))
    return whole, dist.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=True)


def add_fused_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left times right to `total` within the product. Raises torch's errors where the device cannot do it."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def sum_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Add the rows of a matrix [T, O] up -> [O], as autograd does for a bias."""
    return matrix.sum(dim=0)


class WeightGradients(Protocol):
    """Takes the weight gradients of the linear layers of a model chunk."""

    fused: bool
    """Products are added to fp32 without rounding before, and a layer's bias is added within its product."""
    sum_rows: Callable[[torch.Tensor], torch.Tensor]
    """Sums the gradient of an output over tokens, for the bias."""

    @property
    def is_collecting(self) -> bool:
        """True while a backward pass leaves its weight gradients for later."""

    def collect(self, product: WeightProduct) -> None:
        """Leave a weight gradient for later."""

    def add_now(self, product: WeightProduct, layer_input: torch.Tensor) -> None:
        """Compute a weight gradient within its backward pass, from the whole input of the layer [.., I]."""


class DirectGradients:
    """Adds each weight gradient of a model chunk to its `main_grad` within the backward pass."""

    is_collecting = False

    def __init__(
        self,
        chunk: Any,  # noqa: ANN401 - DDP
        *,
        fused: bool = True,
        sum_rows: Callable[[torch.Tensor], torch.Tensor] = sum_rows,
    ) -> None:
        self._chunk = chunk
        self.fused = fused
        self.sum_rows = sum_rows

    def collect(self, product: WeightProduct) -> None:
        """Refuse: nothing is left for later."""
        raise TaskOrderError("weight gradients are computed in each backward pass here, and none is left for later")

    @torch.no_grad()
    def add_now(self, product: WeightProduct, layer_input: torch.Tensor) -> None:
        """Compute a weight gradient within its backward pass, from the whole input of the layer [.., I]."""
        add_product(product, layer_input, fused=self.fused)
        announce(self._chunk, product.weight)


def add_product(product: WeightProduct, layer_input: torch.Tensor, *, fused: bool) -> None:
    """Add the product to the weight's `main_grad`.

    Not fused it is what autograd and the hook of megatron-core's DistributedDataParallel do: the product in the
    precision of its operands, then the sum in that of `main_grad`.
    """
    total: torch.Tensor = product.weight.main_grad  # type: ignore[attr-defined] # set by megatron-core
    left, right = product.output_gradient.t(), layer_input.contiguous().flatten(0, -2)
    if fused:
        add_fused_product(total, left, right)
    else:
        total.add_(left.matmul(right))


def announce(chunk: Any, weight: torch.nn.Parameter) -> None:  # noqa: ANN401 - DDP
    """Register the gradient of a weight at megatron-core's DistributedDataParallel, as its own hook does.

    It counts only the last microbatch's, and begins to reduce a bucket with the last of its parameters.
    """
    if chunk.ddp_config.overlap_grad_reduce:
        chunk.param_to_bucket_group[weight].register_grad_ready(weight, chunk.force_all_reduce)


class WeightGradientStore:
    """Weight gradients of one model chunk that backward passes have left for later.

    Within a step the backward passes (B) of the chunk run in the order of microbatches, and so do its weight gradients
    (W), however late: each sum over microbatches is then the one that passes without the split compute, to the last
    bit. An order that would change a sum raises TaskOrderError.

        store.begin_step(num_microbatches)
        with store.backward(microbatch, split=True):
            output.backward(gradient)  # leaves the weight gradients of the split layers
        store.run(microbatch)          # computes them, any time later
        store.finish_step()            # before megatron-core's finalize_model_grads

    `backward` also says to megatron-core's DistributedDataParallel which microbatch is the last one, so that the caller
    needs no `no_sync`. Parameters become ready for its overlapped reduction in B of the last microbatch, and those of
    split layers in its W. W communicates under sequence parallelism, so ranks of a tensor group run it in the same
    order. It runs on the CUDA stream of B. Until then neither operand may be overwritten: the gradient of
    the chunk's output can be one of them.
    """

    def __init__(
        self,
        chunk: Any,  # noqa: ANN401 - DDP
        *,
        index: int = 0,
        fused: bool = False,
        sum_rows: Callable[[torch.Tensor], torch.Tensor] = sum_rows,
    ) -> None:
        self._chunk = chunk
        self._index = index
        self.fused = fused
        self.sum_rows = sum_rows
        self._microbatches = 0
        self._next_backward = 0
        self._collected: dict[int, list[WeightProduct]] = {}
        self._bytes: dict[int, int] = {}
        """For each pending microbatch of which the bytes have been counted."""
        self._collecting: list[WeightProduct] | None = None
        self._replays: dict[int, Callable[[], None]] = {}
        """For each pending microbatch whose W is replayed."""

    @property
    def is_collecting(self) -> bool:
        """True while a backward pass leaves its weight gradients for later."""
        return self._collecting is not None

    @property
    def pending(self) -> tuple[int, ...]:
        """Microbatches whose W has not run, in the order in which it must."""
        return tuple(self._collected)

    @property
    def retained_bytes(self) -> int:
        """Bytes of memory on this rank that weight gradients of finished backward passes keep alive until W."""
        for microbatch, products in self._collected.items():
            if microbatch not in self._bytes and products is not self._collecting:
                storages = (storage for product in products for storage in product.storages)
                self._bytes[microbatch] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return sum(self._bytes.values())

    def begin_step(self, num_microbatches: int) -> None:
        """Begin a step of `num_microbatches`. Raises TaskOrderError if a W of the step before has not run."""
        self._refuse_pending("a step begins")
        self._microbatches = num_microbatches
        self._next_backward = 0

    @contextlib.contextmanager
    def backward(self, microbatch: int, *, split: bool) -> Iterator[None]:
        """Within the context the backward pass of this microbatch runs.

        `split`: it leaves the weight gradients of the split layers for `run`; otherwise it computes them, too.
        Raises TaskOrderError if it is another microbatch's turn, or without `split` while an earlier W has not run.
        """
        if microbatch != self._next_backward or microbatch >= self._microbatches:
            raise TaskOrderError(
                f"the backward pass of microbatch {microbatch} of chunk {self._index} begins out of turn: the next one "
                f"is {self._next_backward} of {self._microbatches}. Run those of a chunk in order, so that sums of "
                "gradients are always the same"
            )
        if split:
            self._collecting = self._collected[microbatch] = []
        else:
            self._refuse_pending(f"the whole backward pass of microbatch {microbatch} begins")
        is_last = microbatch == self._microbatches - 1
        with contextlib.nullcontext() if is_last else self._chunk.no_sync():
            try:
                yield
            finally:
                self._collecting = None
        self._next_backward += 1

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute the weight gradients of this microbatch (task W) and free their operands, one layer after another.

        Raises TaskOrderError if its backward pass has left none, or an earlier W has not run, or an operand was written
        into since then.
        """
        if self._collecting is not None or microbatch != next(iter(self._collected), None):
            raise TaskOrderError(
                f"the weight gradients (W) of microbatch {microbatch} of chunk {self._index} are not the next ones; "
                f"pending, in this order: {_listed(self.pending)}"
            )
        self._bytes.pop(microbatch, None)
        products = self._collected.pop(microbatch)
        if (replay := self._replays.pop(microbatch, None)) is not None:
            replay()
            return
        is_last = microbatch == self._microbatches - 1
        for product, layer_input in _gathered(collections.deque(products)):
            self._refuse_overwritten(product, microbatch)
            add_product(product, layer_input, fused=self.fused)
            if is_last:
                announce(self._chunk, product.weight)

    @contextlib.contextmanager
    def recording(self, products: list[WeightProduct]) -> Iterator[None]:
        """Within the context a backward pass is recorded that leaves its weight gradients in `products`.

        It belongs to no microbatch: those whose passes are replayed run in the order that `backward` and `run` check.
        """
        outer, self._collecting = self._collecting, products
        try:
            yield
        finally:
            self._collecting = outer

    @torch.no_grad()
    def add_recorded(self, products: list[WeightProduct]) -> None:
        """Compute the weight gradients that a recorded backward pass has left; what their operands hold now counts."""
        for product, layer_input in _gathered(collections.deque(products)):
            add_product(product, layer_input, fused=self.fused)

    def replay_later(self, microbatch: int, replay: Callable[[], None]) -> None:
        """Take what computes the weight gradients of a microbatch whose backward pass was replayed; `run` calls it."""
        assert self._collecting is not None, "a replayed backward pass left weight gradients outside of a split pass"
        self._replays[microbatch] = replay

    def finish_step(self) -> None:
        """End the step. Raises TaskOrderError if a backward pass or a W has not run."""
        self._refuse_pending("the step ends")
        if self._next_backward != self._microbatches:
            raise TaskOrderError(
                f"the step ends after the backward passes of {self._next_backward} of {self._microbatches} "
                f"microbatches of chunk {self._index}; run the others first"
            )

    def collect(self, product: WeightProduct) -> None:
        """Leave a weight gradient for later; for the backward pass of a split layer."""
        assert self._collecting is not None, "a weight gradient was left outside of a split backward pass"
        self._collecting.append(product)

    @torch.no_grad()
    def add_now(self, product: WeightProduct, layer_input: torch.Tensor) -> None:
        """Compute a weight gradient within its backward pass, from the whole input of the layer [.., I]."""
        self._refuse_pending("a backward pass adds to the same weights")
        add_product(product, layer_input, fused=self.fused)
        announce(self._chunk, product.weight)

    def _refuse_pending(self, what: str) -> None:
        if self._collected:
            raise TaskOrderError(
                f"{what} while weight gradients (W) of chunk {self._index} have not run, of microbatches "
                f"{_listed(self.pending)}; run them first"
            )

    def _refuse_overwritten(self, product: WeightProduct, microbatch: int) -> None:
        """Check what autograd checks of the tensors that it saves."""
        if product.versions != (product.input._version, product.output_gradient._version):
            raise TaskOrderError(
                f"an operand of the weight gradients (W) of microbatch {microbatch} of chunk {self._index} was written "
                "into between its backward pass and its W; copy what is changed in place"
            )


def _gathered(products: collections.deque[WeightProduct]) -> Iterator[tuple[WeightProduct, torch.Tensor]]:
    """Yield each product with the whole input of its layer, and empty `products`.

    While one product is computed, the next one's input is gathered.
    """
    begun = _start_product(products[0]) if products else None
    while begun is not None:
        product, (layer_input, work) = products.popleft(), begun
        begun = _start_product(products[0]) if products else None
        if work is not None:
            work.wait()
        yield product, layer_input


def _start_product(product: WeightProduct) -> tuple[torch.Tensor, dist.Work | None]:
    if product.gather_group is None:
        return product.input, None
    return start_gather(product.input, product.gather_group)


def _listed(microbatches: tuple[int, ...]) -> str:
    return ", ".join(map(str, microbatches)) or "none"
