"""Throughput, model FLOPs and the log line."""

import datetime
import math

from megatronapp_trainer.config import ModelConfig
from megatronapp_trainer.observe import StepMetrics


def flops_per_token(model: ModelConfig, padded_vocab_size: int) -> float:
    """Floating-point operations of the forward and backward pass of one token, recomputation not counted.

    Two per multiply-add, and the backward pass costs twice the forward: Narayanan et al. 2021, appendix; attention
    is counted in full although half of it is masked, as Megatron does.
    """
    attended = model.num_attention_heads * model.head_width
    keys = model.heads_of_keys * model.head_width
    projections = model.hidden_size * (attended + 2 * keys) + attended * model.hidden_size
    attention = 2 * model.seq_length * attended
    mlp = (3 if model.swiglu else 2) * model.hidden_size * model.mlp_width
    logits = model.hidden_size * padded_vocab_size
    return 3.0 * 2.0 * (model.num_layers * (projections + attention + mlp) + logits)


def log_line(
    metrics: StepMetrics, *, train_iters: int, elapsed_s: float, batch_size: int, skipped: int, seconds_left: float
) -> str:
    """One line in Megatron's form, so that tools that read its logs read ours."""
    parts = [
        f"iteration {metrics.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {metrics.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_s * 1e3:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {metrics.tflops_per_gpu:.4g}",
        f"tokens per second: {metrics.tokens_per_second:.0f}",
        f"learning rate: {metrics.learning_rate:.6E}",
        f"global batch size: {batch_size:5d}",
        f"lm loss: {metrics.loss:.6E}",
        f"grad norm: {0.0 if metrics.grad_norm is None else metrics.grad_norm:.3f}",
        f"number of skipped iterations: {skipped:3d}",
        f"time left: {datetime.timedelta(seconds=round(seconds_left))}",
    ]
    return " " + " | ".join(parts) + " |"


def validation_line(iteration: int, loss: float, split: str) -> str:
    """The line of an evaluation."""
    return f" {split} loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} |"


def perplexity(loss: float) -> float:
    """exp(loss), bounded as Megatron does."""
    return math.exp(min(20.0, loss))
