"""Rules for numerics: the loss scale, and products of linear layers in 8 bits."""

from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.precision import PrecisionConfig
from megatronapp_trainer.config.root import TrainerConfig

MULTIPLE = 16
"""Inputs and outputs of a linear layer on a rank are multiples of it, as GPUs need."""
_FORMAT, _ENDS = "--fp8-format", "--first-last-layers-bf16"


def precision_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    for rule in (_loss_scale, _fp8):
        yield from rule(config)


def _loss_scale(config: TrainerConfig) -> Iterator[str]:
    precision, plain = config.precision, PrecisionConfig()
    yield from require(not (precision.bf16 and precision.fp16), "--bf16 and --fp16 exclude each other; omit either")
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        flag = f"--{name.replace('_', '-')}"
        yield from require(
            precision.fp16 or getattr(precision, name) == getattr(plain, name),
            f"{flag} is about the loss scale of --fp16; omit it, or add --fp16",
        )
        yield from require(
            precision.loss_scale is None or name == "loss_scale" or getattr(precision, name) == getattr(plain, name),
            f"{flag} is for a scale that adapts, and --loss-scale {precision.loss_scale} fixes it; omit either",
        )
    yield from require(
        precision.min_loss_scale <= precision.initial_loss_scale,
        f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale "
        f"{precision.initial_loss_scale:g}; give at most that",
    )


def _fp8(config: TrainerConfig) -> Iterator[str]:
    precision, plain = config.precision, PrecisionConfig()
    at_ends = (
        ("--num-layers-at-start-in-bf16", precision.num_layers_at_start_in_bf16, plain.num_layers_at_start_in_bf16),
        ("--num-layers-at-end-in-bf16", precision.num_layers_at_end_in_bf16, plain.num_layers_at_end_in_bf16),
    )
    for flag, value, default in at_ends:
        yield from require(
            precision.first_last_layers_bf16 or value == default, f"{flag} needs {_ENDS}; add it, or leave {flag} out"
        )
    if precision.fp8_format is None:
        yield from require(not precision.first_last_layers_bf16, f"{_ENDS} needs {_FORMAT}; add it, or leave it out")
        return
    yield from require(
        precision.bf16, f"{_FORMAT} needs --bf16, in which weights and the rest of the layers are; add it"
    )
    yield from _layers(config)
    yield from _widths(config)


def _layers(config: TrainerConfig) -> Iterator[str]:
    model, precision = config.model, config.precision
    yield from require(
        model.transformer_impl in {"", "torch"},
        f"{_FORMAT} is for our own layers, not for --transformer-impl {model.transformer_impl}; leave one of them out",
    )
    yield from require(
        not config.fbd.enabled,
        f"{_FORMAT} cannot be combined with --forward-backward-disaggregating; leave one of them out",
    )
    left = precision.num_layers_at_start_in_bf16 + precision.num_layers_at_end_in_bf16
    yield from require(
        not precision.first_last_layers_bf16 or left < model.num_layers,
        f"{_ENDS} leaves {left} of {model.num_layers} layers in bf16, and none for {_FORMAT}; leave one of them out, "
        "or lower --num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16",
    )


def _widths(config: TrainerConfig) -> Iterator[str]:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    heads, groups = model.num_attention_heads, model.heads_of_keys
    widths = {
        "--hidden-size": model.hidden_size,
        "the heads of a rank (--num-attention-heads, --kv-channels)": heads * model.head_width // tensor,
        "queries, keys and values of a rank": (heads + 2 * groups) * model.head_width // tensor,
        "the MLP on a rank (--ffn-hidden-size)": model.mlp_width // tensor,
        "the shared expert on a rank (--moe-shared-expert-intermediate-size)": (
            (model.moe_shared_expert_intermediate_size or 0) // tensor
        ),
    }
    for name, width in widths.items():
        yield from require(
            width % MULTIPLE == 0, f"{_FORMAT} needs widths that are multiples of {MULTIPLE}: {name} has {width}"
        )
