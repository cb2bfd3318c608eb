"""Flags of numerics and recomputation."""

import dataclasses
from typing import TYPE_CHECKING

from megatronapp_trainer.config.fields import option, turned_off_by

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Precision and recomputation of activations."""

    bf16: bool = option(False, "bf16 weights and activations; master weights and gradient reduction stay in fp32")
    fp16: bool = option(False, "fp16 weights and activations with a scaled loss; master weights stay in fp32")
    loss_scale: float | None = option(
        None, "fixed factor of the loss with --fp16; default: one that adapts to overflows", bounds="(0, 1e38)"
    )
    initial_loss_scale: float = option(2.0**32, "factor of the loss at the start", bounds="(0, 1e38)")
    min_loss_scale: float = option(1.0, "least factor of the loss", bounds="(0, inf)")
    loss_scale_window: int = option(
        1000, "steps in a row without overflow after which the factor doubles", bounds="[1, inf)"
    )
    hysteresis: int = option(2, "overflows after which the factor is halved", bounds="[1, inf)")
    fp8_format: str | None = option(
        None,
        "number format of the products of linear layers; with --bf16, in which weights, their gradients and the rest "
        "stay",
        choices=("e4m3",),
    )
    fp8_recipe: str = option("rowwise", "how numbers of 8 bits are scaled: a scale for each row", choices=("rowwise",))
    first_last_layers_bf16: bool = option(False, "leave the first and last layers in bf16 with --fp8-format")
    num_layers_at_start_in_bf16: int = option(
        1, "first layers left in bf16 with --first-last-layers-bf16", bounds="[0, inf)"
    )
    num_layers_at_end_in_bf16: int = option(
        1, "last layers left in bf16 with --first-last-layers-bf16", bounds="[0, inf)"
    )
    accumulate_allreduce_grads_in_fp32: bool = option(
        False, "accumulate and reduce the gradients of --fp16 in fp32; those of --bf16 always are"
    )
    recompute_activations: bool = option(False, "short for --recompute-granularity selective")
    recompute_granularity: str | None = option(
        None, "what the backward pass computes again: whole layers, or parts of them", choices=("full", "selective")
    )
    recompute_modules: tuple[str, ...] | None = option(
        None,
        "which parts, with selective; core_attn alone by default",
        choices=("core_attn", "mlp", "moe", "shared_experts"),
    )
    recompute_method: str | None = option(None, "which layers, with full", choices=("uniform", "block"))
    recompute_num_layers: int | None = option(
        None, "layers per recomputed group (uniform) or in all (block), with full", bounds="[1, inf)"
    )
    deterministic_mode: bool = option(False, "refuse operations whose result depends on timing")

    @property
    def name(self) -> str:
        """Return fp32, bf16 or fp16."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def dtype(self) -> "torch.dtype":
        """Return the type of weights and activations."""
        import torch  # the command line reads flags without it

        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def is_half(self) -> bool:
        """Return true if weights and activations have 16 bits."""
        return self.bf16 or self.fp16

    @property
    def reduces_in_fp32(self) -> bool:
        """Return true if gradients of 16 bits are accumulated and reduced in fp32."""
        return self.bf16 or (self.fp16 and self.accumulate_allreduce_grads_in_fp32)

    @property
    def granularity(self) -> str | None:
        """Return full, selective or None."""
        return "selective" if self.recompute_activations else self.recompute_granularity


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """Kernels of training on GPUs. On CPUs all of it is plain torch."""

    bias_gelu_fusion: bool = turned_off_by("--no-bias-gelu-fusion", "bias and GELU in plain torch")
    bias_swiglu_fusion: bool = turned_off_by("--no-bias-swiglu-fusion", "bias and SwiGLU in plain torch")
    bias_dropout_fusion: bool = turned_off_by("--no-bias-dropout-fusion", "bias and residual sum in plain torch")
    persist_layer_norm: bool = turned_off_by("--no-persist-layer-norm", "norms in plain torch")
    fused_cross_entropy: bool = turned_off_by(
        "--no-cross-entropy-loss-fusion", "cross entropy by megatron-core's separate kernels"
    )
    gradient_accumulation_fusion: bool = turned_off_by(
        "--no-gradient-accumulation-fusion",
        "weight gradients are rounded to 16 bits before they are added to those in fp32",
    )
    cuda_graph_impl: str = option(
        "auto",
        "a CUDA graph for each pass of a microbatch: none; local; auto: where passes can be replayed, but not with "
        "--overlap-grad-reduce or --overlap-param-gather on several pipeline stages or tensor ranks, with --use-dpp or "
        "with --fp16, nor with --trace-nccl on tensor ranks",
        choices=("auto", "none", "local"),
    )
