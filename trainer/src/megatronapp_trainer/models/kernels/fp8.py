"""Matrix products of 8-bit operands with a scale for each row, for the linear layers of ``--fp8-format e4m3``.

Each row of an operand is divided by its scale, so that its largest number becomes the largest of e4m3, and rounded;
the product is multiplied by the scales of both rows. The format is that of arXiv 2209.05433, which takes e5m2 for
gradients. Scales of rows, and e4m3 for gradients of outputs, are those of the `rowwise` recipe of torchao, which has
gradients of weights in 8 bits, too. M tokens, N outputs, K inputs.
"""

import dataclasses
import importlib.util
import logging

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device.compiling import can_compile
from megatronapp_trainer.errors import UsageError

log = logging.getLogger(__name__)
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST_SCALE = 1e-30
"""Scale of a row of zeros."""
FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply numbers of 8 bits: Ada and Hopper."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [R, C] in e4m3, whose numbers are `values` times `scales`."""

    values: torch.Tensor
    """[R, C], contiguous."""
    scales: torch.Tensor
    """[R, 1] in fp32."""

    def restored(self) -> torch.Tensor:
        """Return the matrix in fp32."""
        return self.values.float() * self.scales


def quantize_rows(matrix: torch.Tensor, into: Quantized | None = None) -> Quantized:
    """Round a matrix [R, C] to e4m3 with a scale for each row, by default into new memory."""
    rows, columns = matrix.shape
    into = _empty(rows, columns, matrix.device) if into is None else into
    if matrix.is_cuda:
        from megatronapp_trainer.models.kernels.quantize import quantize_rows as on_gpu

        on_gpu(matrix.contiguous(), into.values, into.scales, LARGEST, SMALLEST_SCALE)
        return into
    wide = matrix.float()
    into.scales.copy_((wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE))
    into.values.copy_(wide / into.scales)
    return into


def quantize_columns(matrix: torch.Tensor, into: Quantized | None = None) -> Quantized:
    """Round a matrix [R, C] to e4m3 with a scale for each column; returns the transposed matrix [C, R]."""
    rows, columns = matrix.shape
    into = _empty(columns, rows, matrix.device) if into is None else into
    if matrix.is_cuda:
        from megatronapp_trainer.models.kernels.quantize import quantize_columns as on_gpu

        on_gpu(matrix.contiguous(), into.values, into.scales, LARGEST, SMALLEST_SCALE)
        return into
    return quantize_rows(matrix.t().contiguous(), into)


def _empty(rows: int, columns: int, device: torch.device) -> Quantized:
    return Quantized(
        torch.empty((rows, columns), dtype=E4M3, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device),
    )


def scaled_product(
    left: Quantized, right: Quantized, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply left [M, K] by right [N, K] transposed, and add a bias [N] -> [M, N] in `dtype`.

    On processors, which have no such product, the operands are multiplied in fp32.
    """
    if left.values.is_cuda:
        product: torch.Tensor = torch._scaled_mm(
            left.values,
            right.values.t(),
            scale_a=left.scales,
            scale_b=right.scales.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return product
    sums = (left.values.float() @ right.values.float().t()) * left.scales * right.scales.t()
    return (sums if bias is None else sums + bias.float()).to(dtype)


def linear(inputs: torch.Tensor, weight: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute inputs [.., K] times weight [N, K] transposed, plus bias [N] -> [.., N], in the precision of inputs."""
    product = scaled_product(quantize_rows(inputs.flatten(0, -2)), weight, inputs.dtype, bias)
    return product.view(*inputs.shape[:-1], -1)


def input_gradient(output_gradient: torch.Tensor, weight: Quantized) -> torch.Tensor:
    """Compute the gradient [.., N] of an output times a weight [N, K] -> [.., K], the gradient of the input.

    `weight`: by its columns, [K, N].
    """
    gradient = quantize_rows(output_gradient.flatten(0, -2))
    product = scaled_product(gradient, weight, output_gradient.dtype)
    return product.view(*output_gradient.shape[:-1], -1)


def layers_in_fp8(config: TrainerConfig, device: torch.device) -> range:
    """Return the numbers of the transformer layers, from 1 over all stages, that multiply in 8 bits, and log them.

    Raises:
        UsageError: the device has no such product, or nothing to compile its kernels with.
    """
    precision, count = config.precision, config.model.num_layers
    if precision.fp8_format is None:
        return range(0)
    if device.type == "cuda":
        _require_fp8(device)
    else:
        log.warning(
            "fp8: %s has no product of 8 bits; operands are rounded to e4m3 and multiplied in fp32", device.type
        )
    first, last = 1, count
    if precision.first_last_layers_bf16:
        first += precision.num_layers_at_start_in_bf16
        last -= precision.num_layers_at_end_in_bf16
    log.info("fp8: linear layers of transformer layers %d to %d of %d in e4m3", first, last, count)
    return range(first, last + 1)


def _require_fp8(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        raise UsageError(
            f"--fp8-format e4m3: {torch.cuda.get_device_name(device)} does not multiply numbers of 8 bits (compute "
            f"capability {'.'.join(map(str, capability))}, needs {'.'.join(map(str, FIRST_CAPABILITY))}); leave it out"
        )
    if importlib.util.find_spec("triton") is None or not can_compile():
        raise UsageError(
            "--fp8-format e4m3 needs the package triton and a C compiler, which are not there; install them in the "
            "image of the workers, or leave it out"
        )
