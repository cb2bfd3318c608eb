"""Rules for mixtures of experts: their flags, and what they cannot be combined with yet."""

import dataclasses
import math
from collections.abc import Iterator

from megatronapp_trainer.config.fields import flag_of, require
from megatronapp_trainer.config.model import BALANCING, ExpertsConfig, ModelConfig
from megatronapp_trainer.config.root import TrainerConfig

_WITH_LOSS = BALANCING[:3]
_EXPERTS = "--num-experts"
_BALANCING = "--moe-router-load-balancing-type"


def experts_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    if config.model.num_experts is None:
        yield from _flags_without_experts(config)
        return
    for rule in (_layers, _sizes, _router, _balancing, _capacity, _unsupported):
        yield from rule(config)


def _flags_without_experts(config: TrainerConfig) -> Iterator[str]:
    defaults = ModelConfig()
    for field in dataclasses.fields(ExpertsConfig):
        given = getattr(config.model, field.name) != getattr(defaults, field.name)
        yield from require(not given, f"{flag_of(field)} needs {_EXPERTS}; add it, or leave {flag_of(field)} out")
    size = config.parallel.expert_model_parallel_size
    yield from require(
        size == 1, f"--expert-model-parallel-size {size} needs {_EXPERTS}; add it, or leave the size out"
    )
    yield from _expert_tensor_size(config)


def _expert_tensor_size(config: TrainerConfig) -> Iterator[str]:
    tensor, given = config.parallel.tensor_model_parallel_size, config.parallel.expert_tensor_parallel_size
    yield from require(
        given is None or given == tensor,
        f"--expert-tensor-parallel-size {given} is not supported: an expert is split as other layers are, over "
        f"--tensor-model-parallel-size {tensor}; leave it out",
    )


def _layers(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    try:
        layers = model.expert_layers(model.num_layers)
    except ValueError as error:
        yield f"--moe-layer-freq {model.moe_layer_freq}: {error}"
        return
    yield from require(
        any(layers), f"--moe-layer-freq {model.moe_layer_freq} gives no layer experts; leave {_EXPERTS} out for that"
    )
    without = [rank for rank, own in enumerate(_layers_of_ranks(config)) if not any(layers[layer] for layer in own)]
    yield from require(
        not any(layers) or not without,
        f"--moe-layer-freq {model.moe_layer_freq} gives no experts to pipeline rank {', '.join(map(str, without))} of "
        f"{config.parallel.pipeline_model_parallel_size}, and each needs a layer with some; take fewer stages, or "
        "uneven ones (--decoder-first-pipeline-num-layers)",
    )


def _layers_of_ranks(config: TrainerConfig) -> list[list[int]]:
    """Return the layers of each pipeline rank; an empty list for a division that other rules refuse."""
    parallel, layers, chunks = config.parallel, config.model.num_layers, config.virtual_size
    try:
        counts = parallel.stage_layers(layers)
    except ValueError:
        return []
    if chunks < 1 or any(count % chunks for count in counts):
        return []
    owned: list[list[int]] = [[] for _ in counts]
    first = 0
    for chunk in range(chunks):
        ranks = list(range(len(counts)))
        if config.is_vee and chunk == 1:
            ranks.reverse()
        for rank in ranks:
            is_first = chunk == 0 and rank == ranks[0]
            is_last = chunk == chunks - 1 and rank == ranks[-1]
            counted = (is_first and parallel.account_for_embedding_in_pipeline_split) + (
                is_last and parallel.account_for_loss_in_pipeline_split
            )
            count = counts[rank] // chunks - counted
            owned[rank] += range(first, first + count)
            first += count
    return owned if first == layers else []


def _sizes(config: TrainerConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    experts, size, tensor = model.num_experts, parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    assert experts is not None
    yield from require(
        size < 1 or experts % size == 0,
        f"{_EXPERTS} {experts} must be a multiple of --expert-model-parallel-size {size}",
    )
    yield from _expert_tensor_size(config)
    yield from require(
        tensor == 1 or parallel.sequence_parallel,
        f"{_EXPERTS} with --tensor-model-parallel-size {tensor} needs --sequence-parallel: otherwise all ranks of a "
        "tensor group would route the same tokens; add it",
    )
    for flag, width in (
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size),
        ("--moe-shared-expert-intermediate-size", model.moe_shared_expert_intermediate_size),
    ):
        yield from require(
            width is None or width % tensor == 0,
            f"{flag} {width} must be a multiple of --tensor-model-parallel-size {tensor}",
        )
    yield from require(
        not model.moe_grouped_gemm or (model.hidden_size % 8 == 0 and model.expert_width // tensor % 8 == 0),
        f"--moe-grouped-gemm needs multiples of 8: --hidden-size {model.hidden_size}, and of an expert's width "
        f"{model.expert_width} the part of each tensor rank; leave it out, or change them",
    )
    yield from require(
        not model.moe_shared_expert_gate or model.moe_shared_expert_intermediate_size is not None,
        "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size",
    )


def _router(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    experts, topk = model.num_experts, model.moe_router_topk
    assert experts is not None
    yield from require(topk <= experts, f"--moe-router-topk {topk} is more than {_EXPERTS} {experts}")
    yield from require(
        topk > 1
        or model.moe_router_score_function != "softmax"
        or model.moe_router_pre_softmax
        or "sinkhorn" in model.moe_router_load_balancing_type,
        "--moe-router-topk 1 needs --moe-router-pre-softmax: the softmax over a single expert is always 1, and the "
        "router would learn nothing",
    )
    yield from require(
        not model.moe_router_enable_expert_bias or model.moe_router_score_function == "sigmoid",
        "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid",
    )
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and group_topk is None:
        return
    if groups is None or group_topk is None:
        yield "give --moe-router-num-groups and --moe-router-group-topk together, or neither"
        return
    yield from require(
        groups > 0 and experts % groups == 0,
        f"{_EXPERTS} {experts} must be a multiple of --moe-router-num-groups {groups}",
    )
    yield from require(
        group_topk <= groups, f"--moe-router-group-topk {group_topk} is more than --moe-router-num-groups {groups}"
    )
    yield from require(
        group_topk > 0 and topk % group_topk == 0 and groups > 0 and topk // group_topk <= experts // groups,
        f"--moe-router-topk {topk} must be a multiple of --moe-router-group-topk {group_topk}, and fit into its groups",
    )


def _balancing(config: TrainerConfig) -> Iterator[str]:
    types, coefficients = config.model.moe_router_load_balancing_type, config.model.moe_aux_loss_coeff
    unknown = [name for name in types if name not in BALANCING]
    if unknown:
        yield f"{_BALANCING} {' '.join(unknown)}: take one of {', '.join(BALANCING)}"
        return
    for coefficient in coefficients:
        yield from require(
            math.isfinite(coefficient) and coefficient >= 0, f"--moe-aux-loss-coeff {coefficient} must be 0 or more"
        )
    yield from require(
        len(types) == len(coefficients),
        f"{_BALANCING} has {len(types)} names, and --moe-aux-loss-coeff {len(coefficients)} numbers; give as many",
    )
    if len(types) > 1:
        alone = [name for name in types if name not in _WITH_LOSS]
        yield from require(not alone, f"{_BALANCING} {' '.join(alone)} cannot be combined with others; give it alone")
        yield from require(len(set(types)) == len(types), f"{_BALANCING} {' '.join(types)}: give each once")
    elif types[0] not in _WITH_LOSS:
        yield from require(
            not any(coefficients), f"--moe-aux-loss-coeff is for a loss, and {_BALANCING} {types[0]} adds none"
        )


def _capacity(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    has_capacity = model.moe_expert_capacity_factor is not None
    yield from require(
        has_capacity or not model.moe_pad_expert_input_to_capacity,
        "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor",
    )
    experts, topk, factor = model.num_experts, model.moe_router_topk, model.moe_expert_capacity_factor
    assert experts is not None
    yield from require(
        factor is None or not model.moe_pad_expert_input_to_capacity or topk * factor <= experts,
        f"--moe-pad-expert-input-to-capacity: --moe-expert-capacity-factor {factor} with --moe-router-topk {topk} of "
        f"{experts} experts is a capacity of more than all tokens; give at most "
        f"{math.floor(1000 * experts / topk) / 1000}, or do not pad",
    )
    yield from require(
        has_capacity or model.moe_token_drop_policy == ModelConfig().moe_token_drop_policy,
        "--moe-token-drop-policy needs --moe-expert-capacity-factor: without it no token is dropped",
    )
    yield from require(
        not (has_capacity and "sinkhorn" in model.moe_router_load_balancing_type),
        f"--moe-expert-capacity-factor and {_BALANCING} sinkhorn exclude each other",
    )


def _unsupported(config: TrainerConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    size = parallel.expert_model_parallel_size
    yield from require(
        not model.add_bias_linear, f"{_EXPERTS} needs --disable-bias-linear: biases of experts are not supported"
    )
    yield from require(model.type == "gpt", f"{_EXPERTS} is not supported with --model-type {model.type}; leave it out")
    yield from require(
        model.transformer_impl != "transformer_engine",
        f"{_EXPERTS} is not supported with --transformer-impl transformer_engine; write torch or local",
    )
    yield from require(
        not config.fbd.enabled,
        f"{_EXPERTS} and --forward-backward-disaggregating cannot be combined yet: which expert computes a token is "
        "part of a pass, and is not sent with it; leave one of them out",
    )
    control = config.control
    for flag, on in (
        ("--training-control", control.training_control),
        ("--training-ws-port", control.training_ws_port is not None),
        ("--scope-capture-interval", control.scope_capture_interval is not None),
    ):
        yield from require(
            not on,
            f"{flag} is not supported with {_EXPERTS} yet: captures and perturbations know no experts; leave it out",
        )
    yield from require(
        not config.dpp.use_dpp or size == 1,
        f"--use-dpp needs --expert-model-parallel-size 1, not {size}: replicas that share experts would have to choose "
        "the same order of passes; leave one of them out",
    )
    yield from require(
        not (config.dpp.use_dpp and "global_aux_loss" in model.balancing_losses),
        f"--use-dpp and {_BALANCING} global_aux_loss exclude each other: replicas would have to choose the same order "
        "of passes; take aux_loss or seq_aux_loss",
    )
