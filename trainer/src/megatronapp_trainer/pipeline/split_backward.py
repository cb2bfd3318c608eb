"""Linear layers whose backward pass may compute the gradient of the input alone and leave that of the weights.

After arXiv 2401.10241 (zero bubble pipeline parallelism): backward splits into B, the gradient of a chunk's input, for
which the stage before waits, and W, the gradients of its weights, for which nothing waits until the step's end.
docs/megadpp.md says what is split, and what that costs.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.models.kernels import fp8
from megatronapp_trainer.models.kernels.choice import launches_are_replayed, reason_against_kernels
from megatronapp_trainer.models.kernels.fp8_weights import Fp8Weight, Fp8Weights
from megatronapp_trainer.models.layers import implementation_of
from megatronapp_trainer.pipeline.reduction_order import order_reductions
from megatronapp_trainer.pipeline.schedule import ScheduleContext
from megatronapp_trainer.pipeline.weight_gradients import (
    DirectGradients,
    WeightGradients,
    WeightGradientStore,
    add_fused_product,
    announce,
    start_gather,
    sum_rows,
    weight_product,
)

log = logging.getLogger(__name__)
_EMBEDDINGS = (VocabParallelEmbedding, torch.nn.Embedding)
"""Modules whose weight gradient is no matrix product: it stays in B, and there is nothing to gain."""


def install_split_backward(
    chunks: list[Any],
    *,
    output_layer: bool = True,
    fused: bool = False,
    sum_rows: Callable[[torch.Tensor], torch.Tensor] = sum_rows,
    embedding_rows: bool = False,
    fp8_weights: Fp8Weights | None = None,
) -> list[WeightGradientStore]:
    """Let the linear layers of model chunks leave their weight gradients to a store; returns one for each chunk.

    Outside of `WeightGradientStore.backward(split=True)` they compute what megatron-core's layers do, to the last bit.
    Parameters, state dicts and forward passes are the same. Called again, it replaces the stores. Gradient reductions
    begin in one order from then on (`order_reductions`), whichever passes split on which replica.

    Args:
        chunks: of this rank, in order, each in megatron-core's DistributedDataParallel.
        output_layer: split the output layer, too. Its pending W holds the gradient of all logits of a microbatch.
        fused: add each product to `main_grad` within the matrix product. Faster, and not bit-equal to megatron-core's
            layers: the product is not rounded to the precision of the weights before it is added. Split and whole
            passes both do it, so results do not depend on which of them run.
        sum_rows: sums the gradients of outputs over tokens, for biases.
        embedding_rows: the embedding of tokens adds its gradient row by row, in our own Triton kernel.
        fp8_weights: of the linear layers that multiply in 8 bits; None: no layer does.

    Raises:
        UsageError: the device has no fused product for the model's precision.
    """
    stores = []
    for index, chunk in enumerate(chunks):
        store = WeightGradientStore(chunk, index=index, fused=fused, sum_rows=sum_rows)
        _install(chunk, index, store, output_layer=output_layer, embedding_rows=embedding_rows, fp8_weights=fp8_weights)
        stores.append(store)
    order_reductions(chunks)
    return stores


def install_direct_gradients(
    chunks: list[Any],
    *,
    fused: bool = True,
    sum_rows: Callable[[torch.Tensor], torch.Tensor] = sum_rows,
    embedding_rows: bool = False,
    fp8_weights: Fp8Weights | None = None,
) -> None:
    """Let the linear layers of model chunks add their own weight gradients, by default to fp32 within the product.

    For schedules whose backward passes are whole. Arguments and errors as of `install_split_backward`.
    """
    for index, chunk in enumerate(chunks):
        gradients = DirectGradients(chunk, fused=fused, sum_rows=sum_rows)
        _install(chunk, index, gradients, output_layer=True, embedding_rows=embedding_rows, fp8_weights=fp8_weights)


def _own_embeddings(chunk: Any) -> list[Any]:  # noqa: ANN401 - DDP
    """Return the embeddings of tokens whose table is whole on this rank and belongs to no other module of the chunk."""
    modules = list(chunk.modules())
    uses = collections.Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    return [
        module
        for module in modules
        if isinstance(module, VocabParallelEmbedding)
        and uses[id(module.weight)] == 1
        and module.tp_group.size() == 1
        and not module.reduce_scatter_embeddings
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _RowEmbedding:
    """Takes the place of `forward` of megatron-core's embedding of tokens."""

    module: Any
    chunk: Any
    whole: Callable[[torch.Tensor], torch.Tensor]
    """The module's own, where no gradient is computed."""

    def __call__(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the rows [B, S, H] of tokens [B, S]."""
        weight = self.module.weight
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return self.whole(input_)
        from megatronapp_trainer.models.kernels.embedding import embed

        return embed(input_, weight, lambda parameter: announce(self.chunk, parameter))


def _install(
    chunk: Any,  # noqa: ANN401 - DDP
    index: int,
    gradients: WeightGradients,
    *,
    output_layer: bool,
    embedding_rows: bool,
    fp8_weights: Fp8Weights | None,
) -> None:
    if embedding_rows:
        for module in _own_embeddings(chunk):
            if not isinstance(module.forward, _RowEmbedding):
                module.forward = _RowEmbedding(module, chunk, module.forward)
    in_fp8 = {
        id(module)
        for layer in chunk.modules()
        if fp8_weights and isinstance(layer, BaseTransformerLayer) and layer.layer_number in fp8_weights.layers
        for module in layer.modules()
    }
    for module in _split_layers(chunk, output_layer=output_layer)[0].values():
        if gradients.fused:
            _require_fused_product(module.weight)
        whole = module._forward_impl
        if isinstance(whole, _SplitLayer):
            whole = whole.whole
        in_8_bits = fp8_weights.add(index, module.weight) if fp8_weights and id(module) in in_fp8 else None
        module._forward_impl = _SplitLayer(module.weight, gradients, whole, in_8_bits)


def fused_gradients(context: ScheduleContext) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Choose whether weight gradients are added to fp32 within the matrix product, and log the choice.

    Returns the function that sums the gradients of biases then; None: gradients as megatron-core's layers compute them.
    """
    config = context.config
    weight = next(context.chunks[0].parameters())
    if not weight.is_cuda or not config.precision.reduces_in_fp32 or implementation_of(config) != "torch":
        return None
    if not config.kernels.gradient_accumulation_fusion:
        log.info("weight gradients: rounded before they are added (--no-gradient-accumulation-fusion)")
        return None
    if not has_fused_product(weight.device, weight.dtype, torch.float32):
        log.info("weight gradients: rounded before they are added, as the device has no fused product")
        return None
    log.info("weight gradients: added to fp32 within the matrix product")
    if not uses_small_kernels(config):
        return sum_rows
    from megatronapp_trainer.models.kernels.columns import column_sums

    return column_sums


def uses_small_kernels(config: TrainerConfig) -> bool:
    """Return whether our own Triton kernels run on the GPU of this process, including those that are quick to run."""
    reason = reason_against_kernels(config, is_cuda=True, implementation=implementation_of(config))
    return reason is None and launches_are_replayed(config)


def unsplit_layers(chunk: Any, *, output_layer: bool = True) -> dict[str, str]:  # noqa: ANN401 - DDP
    """Return the layers with a weight gradient that B of this chunk computes in any case: why, by name.

    Embeddings are not named. A chunk of which no layer can be split has nothing to leave for W.
    """
    return _split_layers(chunk, output_layer=output_layer)[1]


def has_fused_product(device: torch.device, operands: torch.dtype, total: torch.dtype) -> bool:
    """Try whether this device adds a product of such operands to a sum of another precision within the product."""
    ones, result = torch.ones(16, 16, device=device, dtype=operands), torch.ones(16, 16, device=device, dtype=total)
    try:
        add_fused_product(result, ones, ones)
    except (NotImplementedError, RuntimeError):
        return False
    return bool((result == 17).all())


def _require_fused_product(weight: torch.nn.Parameter) -> None:
    total = weight.main_grad.dtype  # type: ignore[attr-defined] # set by megatron-core
    if not has_fused_product(weight.device, weight.dtype, total):
        raise UsageError(
            f"{weight.device.type} has no product of {weight.dtype} that adds to {total}: split the backward pass with "
            "fused=False"
        )


def _split_layers(chunk: Any, *, output_layer: bool) -> tuple[dict[str, Any], dict[str, str]]:  # noqa: ANN401 - DDP
    """Return the layers of a chunk that can be split, and why the others cannot, both by name."""
    uses = collections.Counter(
        id(parameter) for module in chunk.modules() for parameter in module.parameters(recurse=False)
    )
    layers, reasons = {}, {}
    for path, module in chunk.named_modules():
        matrices = [part for part in module.parameters(recurse=False) if part.requires_grad and part.dim() > 1]
        without_own = isinstance(module, ColumnParallelLinear) and module.weight is None
        if isinstance(module, _EMBEDDINGS) or not (matrices or without_own):
            continue
        name = path.removeprefix("module.").removeprefix("module.")  # those of DDP and of bf16
        reason = _reason_against(module, shared=without_own or any(uses[id(part)] > 1 for part in matrices))
        if reason is None and name == "output_layer" and not output_layer:
            reason = "left whole, as asked"
        if reason is None:
            layers[name] = module
        else:
            reasons[name] = reason
    return layers, reasons


def _reason_against(module: Any, *, shared: bool) -> str | None:  # noqa: ANN401 - any module with weights
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        return f"{type(module).__name__} has its own backward pass"
    if shared:
        return "shares its weight within the chunk: autograd adds both gradients up first"
    if module.is_expert:
        return "is the layer of an expert"
    if module.gradient_accumulation_fusion:
        return "adds its gradient in Apex' kernel (gradient_accumulation_fusion)"
    if module.config.defer_embedding_wgrad_compute and getattr(module, "grad_output_buffer", None) is not None:
        return "defers its weight gradient itself (defer_embedding_wgrad_compute)"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _SplitLayer:
    """Takes the place of `_forward_impl` of megatron-core's column- and row-parallel linear layers."""

    weight: torch.nn.Parameter
    store: WeightGradients
    whole: Callable[..., torch.Tensor]
    """The module's own, for any weight but its parameter, and for a frozen one."""
    in_8_bits: Fp8Weight | None = None
    """The weight for outputs and gradients of inputs in 8 bits; gradients of weights are not."""

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **options: Any,  # noqa: ANN401 - of fusion and deferral, which are off
    ) -> torch.Tensor:
        """Compute input [S, B, I] times weight [O, I] transposed, plus bias [O] -> [S, B, O]."""
        if weight is not self.weight or not weight.requires_grad:
            return self.whole(
                input=input,
                weight=weight,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **options,
            )
        call = _LayerCall(
            weight=self.weight,
            store=self.store,
            reduce_group=tp_group if allreduce_dgrad else None,
            gather_group=tp_group if sequence_parallel else None,
            in_8_bits=self.in_8_bits,
        )
        # Autograd gets a leaf of its own with the weight's memory: it then never visits the parameter, whose hook would
        # count the gradient of the last microbatch as complete, and which has no gradient in a split pass.
        leaf = weight.detach().requires_grad_()
        output: torch.Tensor = _LinearFunction.apply(input, leaf, bias, call)  # type: ignore[no-untyped-call]
        return output


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _LayerCall:
    """Arguments of a linear layer that autograd does not follow."""

    weight: torch.nn.Parameter
    store: WeightGradients
    reduce_group: dist.ProcessGroup | None
    """Ranks over which the input's gradient is summed."""
    gather_group: dist.ProcessGroup | None
    """Ranks that hold the parts of the input's sequence, and get those of its gradient."""
    in_8_bits: Fp8Weight | None


class _LinearFunction(torch.autograd.Function):
    """A linear layer on one rank of a tensor group, with megatron-core's communication.

    Its arithmetic, and the order of its collectives, are those of megatron-core 0.16's
    LinearWithGradAccumulationAndAsyncCommunication.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: _LayerCall,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.call, ctx.has_bias = call, bias is not None
        whole, gather = _gather_shared(input, call.gather_group)
        if gather is not None:
            gather.wait()
        if call.in_8_bits is not None:
            return fp8.linear(whole, call.in_8_bits.rows(), bias)
        if call.store.fused:  # the bias is added before the product is rounded
            return torch.nn.functional.linear(whole, weight, bias)
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        input, weight = ctx.saved_tensors
        call: _LayerCall = ctx.call
        splits = call.store.is_collecting
        whole, gather = (input, None) if splits else _gather_shared(input, call.gather_group)
        if call.in_8_bits is not None:
            input_gradient = fp8.input_gradient(output_gradient, call.in_8_bits.columns())
        else:
            input_gradient = output_gradient.matmul(weight)
        if gather is not None:
            gather.wait()
        product = weight_product(call.weight, input, output_gradient, call.gather_group)
        # The reduction overlaps the weight gradient if that is computed here, and otherwise the bias gradient alone.
        input_gradient, reduction = _start_reduction(input_gradient, call)
        if splits:
            call.store.collect(product)
        else:
            call.store.add_now(product, whole)
        bias_gradient = call.store.sum_rows(product.output_gradient) if ctx.has_bias else None
        if reduction is not None:
            reduction.wait()
        return input_gradient, None, bias_gradient, None


def _gather_shared(part: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to gather a sequence into megatron-core's buffer, whose content lasts until the next gather."""
    if group is None:
        return part, None
    shape = [part.size(0) * group.size(), *part.shape[1:]]
    return start_gather(part, group, get_global_memory_buffer().get_tensor(shape, part.dtype, "mpu"))


def _start_reduction(gradient: torch.Tensor, call: _LayerCall) -> tuple[torch.Tensor, dist.Work | None]:
    """Begin to sum the input's gradient over the tensor group; under sequence parallelism each rank gets its part."""
    if call.reduce_group is not None:
        return gradient, dist.all_reduce(gradient, group=call.reduce_group, async_op=True)
    if call.gather_group is None:
        return gradient, None
    part = gradient.new_empty((gradient.size(0) // call.gather_group.size(), *gradient.shape[1:]))
    return part, dist.reduce_scatter_tensor(part, gradient, group=call.gather_group, async_op=True)
