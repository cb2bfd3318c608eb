"""Throughput, model FLOPs and the log line."""

import datetime
import math
from collections.abc import Mapping

from megatronapp_trainer.config import ModelConfig, TrainerConfig
from megatronapp_trainer.hooks.step_observer import StepMetrics
from megatronapp_trainer.models.experts.statistics import ExpertStatistics
from megatronapp_trainer.parallel.layout import Layout


def flops_per_token(model: ModelConfig, padded_vocab_size: int) -> float:
    """Return the floating-point operations of forward and backward pass of one token, as Megatron-LM counts them.

    Two per multiply-add, the backward pass costs twice the forward, recomputation is not counted. Of the attention of
    GPT half is counted: the causal mask hides the other half. Up to 2024 Megatron counted all of it, and so do many
    papers. BERT attends to the whole sample; its padding is counted as tokens.
    """
    if model.type == "bert":
        return flops_per_token_full_attention(model, padded_vocab_size)
    return _flops_per_token(model, padded_vocab_size, attended_tokens=model.seq_length / 2)


def flops_per_token_full_attention(model: ModelConfig, padded_vocab_size: int) -> float:
    """Return the same number with the attention as if nothing were masked."""
    return _flops_per_token(model, padded_vocab_size, attended_tokens=model.seq_length)


def device_count(config: TrainerConfig, layout: Layout) -> float:
    """Return the number of devices that compute: several ranks may share a GPU, and with MegaFBD forward ranks may have
    none.
    """
    ranks = layout.global_world_size
    if config.fbd.fbd_forward_on_cpu and layout.fbd is not None:
        ranks = layout.fbd.backward_ranks
    return ranks / config.parallel.ranks_per_gpu


def _flops_per_token(model: ModelConfig, padded_vocab_size: int, *, attended_tokens: float) -> float:
    attended = model.num_attention_heads * model.head_width
    keys = model.heads_of_keys * model.head_width
    projections = model.hidden_size * (attended + 2 * keys) + attended * model.hidden_size
    attention = 2 * attended_tokens * attended
    expert_layers = model.layers_with_experts
    dense_layers = model.num_layers - expert_layers
    mlp_widths = dense_layers * model.mlp_width + expert_layers * _width_of_experts(model)
    mlps = (3 if model.swiglu else 2) * model.hidden_size * mlp_widths
    routers = expert_layers * model.hidden_size * (model.num_experts or 0)
    logits = model.hidden_size * padded_vocab_size
    head = model.hidden_size**2 if model.type == "bert" else 0  # the dense layer before the logits
    return 3.0 * 2.0 * (model.num_layers * (projections + attention) + mlps + routers + head + logits)


def _width_of_experts(model: ModelConfig) -> int:
    """Return the channels inside the experts that a token passes, as if none were dropped."""
    return model.moe_router_topk * model.expert_width + (model.moe_shared_expert_intermediate_size or 0)


PEAKS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.0),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800 PCIe", 756.0),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
)
"""Part of a device's name, and its dense bf16 and fp16 TFLOP/s by its vendor; the first match is used."""


_MIG = "MIG"
"""Part of the name of a MIG slice: `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""


def peak_tflops(device_name: str, *, is_half: bool) -> float | None:
    """Return the peak TFLOP/s of a device in the precision of the training; None if it is not known.

    In fp32 there is no one peak: it depends on whether TF32 is allowed. A MIG slice has the name of its card, but only
    a part of its multiprocessors; the vendor specifies no peak for it.
    """
    device_parts = device_name.split()
    if not is_half or _MIG in device_parts:
        return None
    return next((peak for name, peak in PEAKS if _contains_parts(device_parts, name.split())), None)


def why_no_mfu(device_name: str, *, is_half: bool) -> str | None:
    """Explain why a GPU that trains in bf16 or fp16 has no MFU; None if it has one, or none is expected."""
    if not is_half or device_name == "cpu" or peak_tflops(device_name, is_half=True) is not None:
        return None
    if _MIG in device_name.split():
        return f"no MFU: {device_name} is a MIG slice, which has a part of the card's peak; TFLOP/s are its own"
    return f"no MFU: the peak of {device_name} is not known"


def _contains_parts(name: list[str], expected: list[str]) -> bool:
    """Return True if a name contains these parts; `A100-SXM4-80GB` contains `A100`."""
    parts = [part for text in name for part in text.split("-")]
    return all(part in parts for part in expected)


def log_line(
    metrics: StepMetrics, *, train_iters: int, elapsed_s: float, batch_size: int, skipped: int, seconds_left: float
) -> str:
    """Format one line in Megatron's form, so that tools that read its logs read ours."""
    parts = [
        f"iteration {metrics.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_s * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {metrics.tflops_per_gpu:.4g}",
        *([] if metrics.mfu is None else [f"MFU: {100 * metrics.mfu:.1f} %"]),
        f"tokens per second: {metrics.tokens_per_second:.0f}",
        f"learning rate: {metrics.learning_rate:.6E}",
        f"global batch size: {batch_size:5d}",
        *(f"{name}: {loss:.6E}" for name, loss in metrics.named_losses.items()),
        f"grad norm: {0.0 if metrics.grad_norm is None else metrics.grad_norm:.3f}",
        *([] if metrics.loss_scale is None else [f"loss scale: {metrics.loss_scale:.1f}"]),
        *([] if metrics.memory_gib is None else [memory_text(*metrics.memory_gib)]),
        f"number of skipped iterations: {skipped:3d}",
        f"time left: {datetime.timedelta(seconds=round(seconds_left))}",
    ]
    return " " + " | ".join(parts) + " |"


def memory_text(allocated_gib: float, reserved_gib: float) -> str:
    """Format the peaks of a device's memory since the last log line."""
    return f"memory (GiB): {allocated_gib:.2f} allocated, {reserved_gib:.2f} reserved"


def experts_line(experts: ExpertStatistics) -> str:
    """Format the fullest and the emptiest expert of the step, each over the mean load in its layer, and drops."""
    loads = [
        (count * len(counts) / max(sum(counts), 1), layer, expert)
        for layer, counts in zip(experts.layers, experts.load, strict=True)
        for expert, count in enumerate(counts)
    ]
    extremes = {"fullest": max(loads), "emptiest": min(loads)}
    parts = [
        f"{name} expert: {load:.2f} x mean load (layer {layer}, expert {expert})"
        for name, (load, layer, expert) in extremes.items()
    ]
    return " | ".join([*parts, f"dropped: {100 * experts.dropped:.1f} %"]) + " |"


def expert_events(experts: ExpertStatistics) -> dict[str, float]:
    """Return scalars for an event file: the fraction of its layer's tokens that each expert has taken, and drops."""
    fractions = {
        f"moe/layer {layer}/expert {expert}": count / max(sum(counts), 1)
        for layer, counts in zip(experts.layers, experts.load, strict=True)
        for expert, count in enumerate(counts)
    }
    return {**fractions, "moe/load imbalance": experts.imbalance, "moe/dropped": experts.dropped}


def validation_line(iteration: int, losses: Mapping[str, float], split: str) -> str:
    """Format the line of an evaluation with the mean of each loss by its name."""
    parts = [
        text
        for name, loss in losses.items()
        for text in (f"{name} value: {loss:.6E}", f"{name} PPL: {perplexity(loss):.6E}")
    ]
    return f" {split} loss at iteration {iteration} | {' | '.join(parts)} |"


def perplexity(loss: float) -> float:
    """Return exp(loss), bounded as Megatron does."""
    return math.exp(min(20.0, loss))
