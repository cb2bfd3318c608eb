"""Comparison of a checkpoint's arguments with those of a run: required, noted, and those that build its model."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatronapp_trainer.checkpoint import resume_rates
from megatronapp_trainer.checkpoint.directory import Manifest
from megatronapp_trainer.config import DataConfig, ModelConfig, TrainerConfig, build_parser
from megatronapp_trainer.config.fields import read_section
from megatronapp_trainer.data.vocabulary import load_vocabulary

Getter = Callable[[TrainerConfig], Any]


@functools.lru_cache(maxsize=4)
def _vocab_size(data: DataConfig) -> int:
    """Return the number of tokens before padding; megatron-core reads embeddings of another size without an error."""
    return load_vocabulary(data).vocab_size


DECOUPLED = "--decoupled-lr"
"""Flag that a manifest records as a boolean; manifests of the first releases lack it."""


def _of_experts(get: Callable[[ModelConfig], Any]) -> Getter:
    """Return a getter of a property of the experts; None for a model without any."""
    return lambda config: None if config.model.num_experts is None else get(config.model)


_EXPERTS: dict[str, Getter] = {
    "--num-experts": lambda c: c.model.num_experts,
    "--moe-layer-freq": _of_experts(lambda model: str([int(has) for has in model.expert_layers(model.num_layers)])),
    "--moe-ffn-hidden-size": _of_experts(lambda model: model.expert_width),
    "--moe-shared-expert-intermediate-size": _of_experts(lambda model: model.moe_shared_expert_intermediate_size),
    "--moe-shared-expert-gate": _of_experts(lambda model: model.moe_shared_expert_gate),
    "--moe-router-topk": _of_experts(lambda model: model.moe_router_topk),
    "--moe-router-score-function": _of_experts(lambda model: model.moe_router_score_function),
    "--moe-router-pre-softmax": _of_experts(lambda model: model.moe_router_pre_softmax),
    "--moe-router-topk-scaling-factor": _of_experts(lambda model: model.moe_router_topk_scaling_factor),
    "--moe-router-num-groups": _of_experts(lambda model: model.moe_router_num_groups),
    "--moe-router-group-topk": _of_experts(lambda model: model.moe_router_group_topk),
    "--moe-router-enable-expert-bias": _of_experts(lambda model: model.moe_router_enable_expert_bias),
}
"""Arguments that define a model's mixtures of experts."""

_MODEL: dict[str, Getter] = {
    "--model-type": lambda c: c.model.type,
    "--num-layers": lambda c: c.model.num_layers,
    "--bert-no-binary-head": lambda c: not c.model.bert_binary_head,
    "--hidden-size": lambda c: c.model.hidden_size,
    "--num-attention-heads": lambda c: c.model.num_attention_heads,
    "--num-query-groups": lambda c: c.model.heads_of_keys,
    "--kv-channels": lambda c: c.model.head_width,
    "--ffn-hidden-size": lambda c: c.model.mlp_width,
    "--position-embedding-type": lambda c: c.model.position_embedding_type,
    "--max-position-embeddings": lambda c: c.model.positions,
    "--rotary-base": lambda c: _plain(c.model.rotary_base) if c.model.position_embedding_type == "rope" else None,
    "--rotary-percent": lambda c: c.model.rotary_percent if c.model.position_embedding_type == "rope" else None,
    "--use-rope-scaling": lambda c: c.model.use_rope_scaling,
    "--rope-scaling-factor": lambda c: _plain(c.model.rope_scaling_factor) if c.model.use_rope_scaling else None,
    "--window-size": lambda c: None if c.model.attention_window is None else f"{c.model.attention_window},0",
    "--normalization": lambda c: c.model.normalization,
    "--norm-epsilon": lambda c: c.model.norm_epsilon,
    "--qk-layernorm": lambda c: c.model.qk_layernorm,
    "--swiglu": lambda c: c.model.swiglu,
    "--openai-gelu": lambda c: c.model.openai_gelu,
    "--disable-bias-linear": lambda c: not c.model.add_bias_linear,
    "--add-qkv-bias": lambda c: c.model.add_qkv_bias,
    "--untie-embeddings-and-output-weights": lambda c: c.model.untie_embeddings_and_output_weights,
    "--vocab-size": lambda c: _vocab_size(c.data),
    **_EXPERTS,
}
"""Arguments that define the model."""

_PADDING: dict[str, Getter] = {
    "--make-vocab-size-divisible-by": lambda c: c.model.make_vocab_size_divisible_by,
}
_SIZES: dict[str, Getter] = {"--seq-length": lambda c: c.model.seq_length} | _PADDING
"""Further arguments that are needed to build the model, but may differ in the next run."""

_OPTIMIZER: dict[str, Getter] = {
    "--use-distributed-optimizer": lambda c: c.parallel.use_distributed_optimizer,
    "--bf16": lambda c: c.precision.bf16,
    "--fp16": lambda c: c.precision.fp16,
    "--optimizer": lambda c: c.optimizer.optimizer,
    DECOUPLED: lambda c: c.optimizer.decoupled_lr is not None,
}
"""Arguments that define how optimizer state is stored."""

_DATA: dict[str, Getter] = {
    "--seed": lambda c: c.training.seed,
    "--seq-length": lambda c: c.model.seq_length,
    "--global-batch-size": lambda c: c.training.global_batch_size,
    "--train-iters": lambda c: c.training.train_iters,
    "--train-samples": lambda c: c.training.train_samples,
    "--rampup-batch-size": lambda c: _listed(c.training.rampup_batch_size),
    "--data-path": lambda c: list(c.data.data_path or ()),
    "--train-data-path": lambda c: list(c.data.train_data_path or ()),
    "--split": lambda c: c.data.split,
    "--sft": lambda c: c.data.sft,
    "--sft-tokenizer-prompt-format": lambda c: c.data.sft_tokenizer_prompt_format if c.data.sft else None,
    "--hf-dataset": lambda c: None if c.data.hf_dataset is None else list(c.data.hf_dataset),
    "--hf-split": lambda c: None if c.data.hf_dataset is None else c.data.hf_split,
    "--hf-text-field": lambda c: None if c.data.hf_dataset is None else c.data.hf_text_field,
    "--short-seq-prob": lambda c: c.data.short_seq_prob if c.model.type == "bert" else None,
}
"""Arguments that the order of samples depends on."""

_MASKING: dict[str, Getter] = {
    "--mask-prob": lambda c: c.data.mask_prob if c.model.type == "bert" else None,
}
"""Arguments that the contents of samples depend on, but not their order."""

_OF_EARLIER_RELEASES = {
    "--model-type": "gpt",
    "--fp16": False,
    "--num-experts": None,
    "--sft": False,
    "--qk-layernorm": False,
}
"""Values of arguments that manifests lack from before there was a choice."""

TOKENIZER_FILE = "--tokenizer-file"
"""Key in a manifest of the name of a tokenizer.json next to it, which only converted checkpoints have."""


def record(config: TrainerConfig) -> dict[str, Any]:
    """Return the arguments for the manifest."""
    return {flag: get(config) for flag, get in (_MODEL | _SIZES | _OPTIMIZER | _DATA | _MASKING).items()}


def record_weights(config: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of a checkpoint that has weights alone, from no training."""
    return {flag: get(config) for flag, get in (_MODEL | _SIZES).items()} | {
        "--bf16": config.precision.bf16,
        "--fp16": config.precision.fp16,
    }


def holds_weights_alone(stored: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint with these arguments was converted, so that no training can be resumed from it."""
    return "--train-iters" not in stored


def model_flags(stored: Mapping[str, Any]) -> list[str]:
    """Return the flags that build the model of a manifest's arguments, including `--vocab-size`.

    Sizes are those of the manifest; a command line may override `--seq-length` after them.
    """
    command: list[str] = []
    for flag in (*_MODEL, *_SIZES):
        value = stored.get(flag)
        if flag == "--num-query-groups":
            command += (
                [] if value == stored.get("--num-attention-heads") else ["--group-query-attention", flag, str(value)]
            )
        elif value is True:
            command.append(flag)
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command


def precision_of(stored: Mapping[str, Any]) -> str:
    """Return fp32, bf16 or fp16, the precision of a manifest's arguments."""
    return next((name for name in ("bf16", "fp16") if stored.get(f"--{name}")), "fp32")


def type_of(stored: Mapping[str, Any]) -> str:
    """Return the model type of a manifest's arguments, which earlier releases did not record."""
    return str(stored.get("--model-type", _OF_EARLIER_RELEASES["--model-type"]))


def model_of(stored: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a manifest's arguments. Dropout has its default: it is no part of a model."""
    return read_section(ModelConfig, build_parser().parse_args(model_flags(stored)))


def conflict(stored: dict[str, Any], config: TrainerConfig, *, optimizer: bool) -> str | None:
    """Return why a checkpoint cannot be read into this run, or None. `optimizer`: its state is read, too."""
    needed = _compared(config) | (_OPTIMIZER if optimizer else {})
    differences = _differences(stored, config, needed)
    if not differences:
        return None
    advice = "give the checkpoint's values, or another directory with --save and --load"
    if all(flag in _OPTIMIZER for flag in differences):
        advice += ", or read the weights alone with --no-load-optim"
    return f"this run differs from the checkpoint in {_describe_differences(differences)}; {advice}"


def model_difference(there: TrainerConfig, here: TrainerConfig) -> str | None:
    """Describe in what two models differ; None if they are equal."""
    compared = _compared(here)
    differences = _differences({flag: get(there) for flag, get in compared.items()}, here, compared)
    return f"it differs in {_describe_differences(differences)}" if differences else None


def notes(stored: dict[str, Any], config: TrainerConfig) -> str | None:
    """Describe what changes about samples, their order and the loss; None if nothing does."""
    changes = {
        "samples are read in another order": _DATA,
        "other tokens are masked": _MASKING,
        "the softmax of the loss has another number of rows without a token": _padding_flags(stored, config),
    }
    found = {change: _differences(stored, config, flags) for change, flags in changes.items()}
    described = (
        f"{change} than before, because this run differs in {_describe_differences(differences)}"
        for change, differences in found.items()
        if differences
    )
    return "; ".join(described) or None


def _padding_flags(stored: Mapping[str, Any], config: TrainerConfig) -> dict[str, Getter]:
    """Return the flag of the padding if it gives the vocabulary another size than a manifest's."""
    vocab_size = stored.get("--vocab-size")
    padded = {model.padded_vocab_size(vocab_size) for model in (model_of(stored), config.model)} if vocab_size else ()
    return _PADDING if len(padded) > 1 else {}


def order_samples(stored: Manifest, config: TrainerConfig, data_size: int) -> int | None:
    """Return the number of samples for which a resumed run shuffles its data, or None for that of its flags.

    Releases before --train-samples counted the steps of a ramp-up as full ones.
    """
    training = config.training
    if _differences(stored.arguments, config, _DATA):
        return None
    if resume_rates.counted_in_full(stored.arguments, config):
        return training.train_iters * config.global_batch_size(data_size)
    return stored.order_samples


def _compared(config: TrainerConfig) -> dict[str, Getter]:
    """Return the arguments that define the model. Only learned positions have rows; otherwise their number does not
    matter. Where all layers have experts, no MLP has the width of dense ones.
    """
    model = config.model
    learned = model.position_embedding_type == "learned_absolute"
    unused = set() if learned else {"--max-position-embeddings"}
    if all(model.expert_layers(model.num_layers)):
        unused.add("--ffn-hidden-size")
    return {flag: get for flag, get in _MODEL.items() if flag not in unused}


def _listed(numbers: tuple[int, ...] | None) -> list[int] | None:
    """Convert to a list, as JSON returns it."""
    return None if numbers is None else list(numbers)


def _plain(number: float) -> float:
    """Format a whole number without its fraction of zeros."""
    return int(number) if number == int(number) else number


def _differences(stored: dict[str, Any], config: TrainerConfig, flags: dict[str, Getter]) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    stored = _OF_EARLIER_RELEASES | stored
    for flag, get in flags.items():
        if flag in stored and stored[flag] != (here := get(config)):
            found[flag] = (stored[flag], here)
    return found


def _describe_differences(differences: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{flag} ({_show(there)} there, {_show(here)} here)" for flag, (there, here) in differences.items()
    )


def _show(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value) or "none"
    return (
        {None: "none", True: "on", False: "off"}.get(value, str(value))
        if value is None or isinstance(value, bool)
        else str(value)
    )
