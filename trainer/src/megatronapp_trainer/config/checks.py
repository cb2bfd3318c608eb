"""Rules that a configuration must follow to be trained, apart from those on the number of ranks."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence

from megatronapp_trainer.config.dpp import dpp_problems, world_problems
from megatronapp_trainer.config.fields import out_of_bounds, require
from megatronapp_trainer.config.model import ModelConfig
from megatronapp_trainer.config.root import TrainerConfig
from megatronapp_trainer.config.rules.bert import bert_problems
from megatronapp_trainer.config.rules.checkpoint import memory_problems
from megatronapp_trainer.config.rules.context import context_problems
from megatronapp_trainer.config.rules.control import control_problems
from megatronapp_trainer.config.rules.data import DATA_RULES
from megatronapp_trainer.config.rules.experts import experts_problems
from megatronapp_trainer.config.rules.fbd import fbd_problems
from megatronapp_trainer.config.rules.graphs import graph_problems
from megatronapp_trainer.config.rules.precision import precision_problems
from megatronapp_trainer.config.rules.schedules import SCHEDULE_RULES
from megatronapp_trainer.config.rules.tokenizer import tokenizer_problems
from megatronapp_trainer.config.rules.trace import trace_problems
from megatronapp_trainer.config.rules.watch import watch_problems
from megatronapp_trainer.errors import UsageErrors


def find_problems(config: TrainerConfig, refusals: Sequence[str] = ()) -> list[str]:
    """Return a sentence for every rule that the configuration breaks.

    A rule is skipped if it concerns a flag of an earlier sentence or of `refusals`, the reasons why a command line
    could not be read: it would judge the default of that flag, or repeat the sentence.
    """
    found: list[str] = []
    for rules in ((_bounds, _required_flags, _group_sizes), _RULES):
        refused = set(_FLAG.findall(" ".join([*refusals, *found])))
        found += [problem for problem in _broken(rules, config) if not refused & set(_FLAG.findall(problem))]
        config = _divisible(config)
    return found


def _divisible(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with 1 in place of divisors that are missing or not positive."""
    model, parallel = config.model, config.parallel
    heads, groups = model.num_attention_heads, model.num_query_groups
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            num_layers=max(model.num_layers, 1),
            hidden_size=max(model.hidden_size, 1),
            num_attention_heads=max(heads, 1),
            num_query_groups=max(groups, 1),
            make_vocab_size_divisible_by=max(model.make_vocab_size_divisible_by, 1),
        ),
        parallel=dataclasses.replace(
            parallel,
            tensor_model_parallel_size=max(parallel.tensor_model_parallel_size, 1),
            pipeline_model_parallel_size=max(parallel.pipeline_model_parallel_size, 1),
            context_parallel_size=max(parallel.context_parallel_size, 1),
            num_layers_per_virtual_pipeline_stage=_check_positive(parallel.num_layers_per_virtual_pipeline_stage),
        ),
    )


def _check_positive(size: int | None) -> int | None:
    return None if size is None else max(size, 1)


_FLAG = re.compile(r"--[a-z][\w-]*")
Rule = Callable[[TrainerConfig], Iterator[str]]


def _broken(rules: tuple[Rule, ...], config: TrainerConfig) -> list[str]:
    return [problem for rule in rules for problem in rule(config)]


def _bounds(config: TrainerConfig) -> Iterator[str]:
    """Yield numbers outside the bounds that their fields declare."""
    for section in dataclasses.fields(config):
        yield from out_of_bounds(getattr(config, section.name))


def check_world(config: TrainerConfig, data_size: int) -> None:
    """Raise UsageErrors if the global batch does not fit this number of replicas, or flags about nodes its ranks."""
    if problems := list(_world(config, data_size)):
        raise UsageErrors(problems)


def _world(config: TrainerConfig, data_size: int) -> Iterator[str]:
    batch, stride = config.global_batch_size(data_size), config.training.micro_batch_size * data_size
    yield from require(
        batch % stride == 0,
        f"--global-batch-size {batch} is not a multiple of --micro-batch-size {config.training.micro_batch_size} "
        f"x {data_size} replicas; take a multiple of {stride}",
    )
    if config.training.rampup_batch_size is not None:
        start, increment, _ = config.training.rampup_batch_size
        yield from require(
            start % stride == 0 and increment % stride == 0,
            f"--rampup-batch-size: start {start} and increment {increment} must be multiples of {stride} "
            f"(--micro-batch-size x replicas)",
        )
    pipeline, experts = config.parallel.pipeline_model_parallel_size, config.parallel.expert_model_parallel_size
    yield from require(
        data_size % experts == 0,
        f"{data_size} replicas cannot share experts in groups of --expert-model-parallel-size {experts}; take a "
        "divisor of the number of replicas",
    )
    yield from world_problems(config.dpp, config.world_size(data_size))
    beyond = [str(rank) for rank in config.watch.profile_ranks if not 0 <= rank < config.world_size(data_size)]
    yield from require(
        not (config.watch.profile and beyond),
        f"--profile-ranks {' '.join(beyond)}: ranks are 0 to {config.world_size(data_size) - 1}; leave others out",
    )
    sizes = (batch, *(config.training.rampup_batch_size or ())[:2])
    if config.virtual_size > 1 and not config.is_vee:
        yield from require(
            all(size // stride % pipeline == 0 for size in sizes),
            f"the interleaved schedule needs a multiple of --pipeline-model-parallel-size {pipeline} microbatches "
            f"in each step; take batch sizes that are multiples of {stride * pipeline}",
        )


def _required_flags(config: TrainerConfig) -> Iterator[str]:
    needed = {
        "--num-layers": config.model.num_layers,
        "--hidden-size": config.model.hidden_size,
        "--num-attention-heads": config.model.num_attention_heads,
        "--seq-length": config.model.seq_length,
        "--micro-batch-size": config.training.micro_batch_size,
        "--lr": config.optimizer.lr,
    }
    if config.training.train_samples is None:
        needed["--train-iters"] = config.training.train_iters
    for flag, value in needed.items():
        yield from require(value > 0, f"{flag} is missing or not positive; give it a value above 0")


def _group_sizes(config: TrainerConfig) -> Iterator[str]:
    """Check the sizes of groups, before the rules that divide by them."""
    parallel = config.parallel
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        "--context-parallel-size": parallel.context_parallel_size,
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage,
        "--num-query-groups": config.model.num_query_groups,
        "--make-vocab-size-divisible-by": config.model.make_vocab_size_divisible_by,
    }
    for flag, size in sizes.items():
        yield from require(size is None or size > 0, f"{flag} must be 1 or more")


def _attention(config: TrainerConfig) -> Iterator[str]:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    if not (
        yield from require(
            model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0,
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads "
            f"{model.num_attention_heads}; take one, or give --kv-channels",
        )
    ):
        return
    if not (
        yield from require(
            model.num_attention_heads % model.heads_of_keys == 0,
            f"--num-attention-heads {model.num_attention_heads} is not a multiple of "
            f"--num-query-groups {model.heads_of_keys}",
        )
    ):
        return
    heads, groups = model.num_attention_heads, model.heads_of_keys
    if not (
        yield from require(
            heads % tensor == 0,
            f"--num-attention-heads ({heads}) must be a multiple of --tensor-model-parallel-size {tensor}",
        )
    ):
        return
    if not (
        yield from require(
            groups % tensor == 0 or tensor % groups == 0,
            f"key heads ({groups}) must be a multiple or a divisor of --tensor-model-parallel-size {tensor}",
        )
    ):
        return
    rows = (heads + 2 * groups) * model.head_width
    yield from require(
        rows % tensor == 0,
        f"the {rows} rows of query, key and value cannot be split over --tensor-model-parallel-size {tensor}",
    )


def _positions(config: TrainerConfig) -> Iterator[str]:
    model, data = config.model, config.data
    yield from require(
        model.positions >= model.seq_length,
        f"--max-position-embeddings {model.positions} is below --seq-length {model.seq_length}",
    )
    yield from require(
        not (data.reset_position_ids and model.position_embedding_type == "rope"),
        "--reset-position-ids has no effect on rotary positions, which are relative; leave it out or take "
        "--position-embedding-type learned_absolute",
    )


def _shape(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    yield from require(
        not (model.openai_gelu and model.swiglu), "--openai-gelu and --swiglu are both activations of the MLP; give one"
    )
    yield from require(
        not model.qk_layernorm or model.transformer_impl != "transformer_engine",
        "--qk-layernorm is not supported with --transformer-impl transformer_engine yet; write torch or local",
    )
    yield from require(
        not model.use_rope_scaling or model.position_embedding_type == "rope",
        "--use-rope-scaling needs --position-embedding-type rope",
    )
    for flag, value in (("--rotary-base", model.rotary_base), ("--rope-scaling-factor", model.rope_scaling_factor)):
        yield from require(value > 0, f"{flag} must be above 0")
    yield from require(
        _is_window(model),
        f"--window-size {model.window_size}: write --window-size 1023,0 for 1,024 tokens, the token itself among them; "
        "the first number is 0 or more (-1: all), the second is 0, because a token of this model never looks ahead",
    )


def _accepted_spellings(config: TrainerConfig) -> Iterator[str]:
    """Check flags of Megatron that may only choose what this trainer does anyway."""
    model = config.model
    local = model.transformer_impl == "local"
    for flag, on in (
        ("--use-flash-attn", model.use_flash_attn),
        ("--attention-backend flash", model.attention_backend == "flash"),
        ("--attention-backend fused", model.attention_backend == "fused"),
    ):
        yield from require(not (on and local), f"{flag} and --transformer-impl local exclude each other; omit one")
    yield from require(
        model.attention_backend != "local" or local, "--attention-backend local needs --transformer-impl local"
    )


def _is_window(model: ModelConfig) -> bool:
    try:
        window = model.window
    except ValueError:
        return False
    return window is None or (window[0] >= -1 and window[1] == 0)


def _tensor_parallel(config: TrainerConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    yield from require(
        not parallel.sequence_parallel or tensor > 1, "--sequence-parallel needs --tensor-model-parallel-size above 1"
    )
    yield from require(
        not parallel.sequence_parallel or model.seq_length % tensor == 0,
        f"--sequence-parallel: --seq-length {model.seq_length} must be a multiple of "
        f"--tensor-model-parallel-size {tensor}",
    )
    yield from require(
        model.make_vocab_size_divisible_by % tensor == 0,
        f"--make-vocab-size-divisible-by {model.make_vocab_size_divisible_by} must be a multiple of "
        f"--tensor-model-parallel-size {tensor}: the padded vocabulary does not depend on the layout",
    )
    yield from require(
        model.mlp_width % tensor == 0,
        f"--ffn-hidden-size {model.mlp_width}{'' if model.ffn_hidden_size else ', which follows from --hidden-size,'} "
        f"must be a multiple of --tensor-model-parallel-size {tensor}",
    )
    yield from require(
        parallel.ranks_per_gpu == 1 or parallel.distributed_backend == "gloo",
        f"--ranks-per-gpu {parallel.ranks_per_gpu} needs --distributed-backend gloo: NCCL has one rank on a GPU",
    )
    yield from require(
        parallel.ranks_per_gpu == 1 or not (parallel.use_distributed_optimizer or parallel.overlap_grad_reduce),
        f"--ranks-per-gpu {parallel.ranks_per_gpu} excludes --use-distributed-optimizer and --overlap-grad-reduce: "
        "gloo has no such reductions of CUDA tensors; leave them out",
    )


def _pipeline(config: TrainerConfig) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    pipeline, virtual = parallel.pipeline_model_parallel_size, config.virtual_size
    if not (
        yield from require(
            parallel.num_virtual_stages_per_pipeline_rank is None
            or parallel.num_layers_per_virtual_pipeline_stage is None,
            "give --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank, not both",
        )
    ):
        return
    if not (
        yield from require(virtual > 0, f"--num-layers {layers} cannot be divided into {pipeline} stages of 0 chunks")
    ):
        return
    yield from require(
        virtual == 1 or pipeline > 1, "an interleaved schedule needs --pipeline-model-parallel-size above 1"
    )


def _stages(config: TrainerConfig) -> Iterator[str]:
    """Check the number of layers of each stage."""
    parallel, layers = config.parallel, config.model.num_layers
    virtual = config.virtual_size
    ends = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    given = [flag for flag, value in ends.items() if value is not None]
    if virtual < 1:  # another rule says so
        return
    problems = list(_of_stage_flags(config, {flag: ends[flag] or 0 for flag in given}))
    yield from problems
    if not problems:
        yield from require(_fits(parallel.stage_layers, layers, virtual), _pipeline_split_hint(config, given))


def _of_stage_flags(config: TrainerConfig, given: dict[str, int]) -> Iterator[str]:
    """Yield the errors of each flag of uneven stages; `given`: those of the first and the last stage."""
    parallel, pipeline, virtual = config.parallel, config.parallel.pipeline_model_parallel_size, config.virtual_size
    for flag, value in given.items():
        yield from require(pipeline > 1, f"{flag} needs --pipeline-model-parallel-size above 1")
        yield from require(value > 0, f"{flag} must be above 0")
        yield from require(value % virtual == 0, f"{flag} {value} cannot be divided into {virtual} chunks")
    yield from require(
        not given or parallel.num_layers_per_virtual_pipeline_stage is None,
        f"{' and '.join(given)}: give --num-virtual-stages-per-pipeline-rank "
        "instead of --num-layers-per-virtual-pipeline-stage",
    )
    counted = {
        "--account-for-embedding-in-pipeline-split": parallel.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": parallel.account_for_loss_in_pipeline_split,
    }
    for flag, on in counted.items():
        yield from require(not on or pipeline > 1, f"{flag} needs --pipeline-model-parallel-size above 1")
        yield from require(not (on and given), f"{flag} and {' and '.join(given)} exclude each other")


def _fits(stage_layers: Callable[[int], tuple[int, ...]], layers: int, virtual: int) -> bool:
    try:
        return all(count > 0 and count % virtual == 0 for count in stage_layers(layers))
    except ValueError:
        return False


def _pipeline_split_hint(config: TrainerConfig, given: list[str]) -> str:
    parallel, layers = config.parallel, config.model.num_layers
    pipeline, virtual = parallel.pipeline_model_parallel_size, config.virtual_size
    chunks = f" of {virtual} chunks" if virtual > 1 else ""
    if given:
        ends = " and ".join(f"{flag} {getattr(parallel, flag[2:].replace('-', '_'))}" for flag in given)
        return f"{ends} leave layers of --num-layers {layers} that the other stages cannot share evenly{chunks}"
    counted = parallel.counted_as_layers
    more = f" and {counted} counted for embedding and loss" if counted else ""
    return (
        f"--num-layers {layers}{more} cannot be divided into {pipeline} stages{chunks}; take a multiple of "
        f"{pipeline * virtual}{f' less {counted}' if counted else ''}, or give uneven stages with "
        "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
    )


def _dpp(config: TrainerConfig) -> Iterator[str]:
    yield from dpp_problems(config.dpp, config.parallel, config.virtual_size)


def _overlap(config: TrainerConfig) -> Iterator[str]:
    parallel = config.parallel
    yield from require(
        not parallel.overlap_param_gather or parallel.use_distributed_optimizer,
        "--overlap-param-gather needs --use-distributed-optimizer",
    )
    yield from require(
        not parallel.overlap_param_gather or parallel.overlap_grad_reduce,
        "--overlap-param-gather needs --overlap-grad-reduce",
    )
    yield from require(
        parallel.overlap_data_parallel or not parallel.overlap_grad_reduce,
        "--no-overlap-data-parallel and --overlap-grad-reduce exclude each other",
    )
    yield from require(
        not (parallel.ddp_average_in_collective and config.training.calculate_per_token_loss),
        "--ddp-average-in-collective and --calculate-per-token-loss exclude each other: gradients are then divided by "
        "tokens, after the collective",
    )


def _recompute(config: TrainerConfig) -> Iterator[str]:
    precision = config.precision
    if precision.granularity == "full":
        yield from require(
            precision.recompute_method is not None and precision.recompute_num_layers is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )
    else:
        yield from require(
            precision.recompute_method is None and precision.recompute_num_layers is None,
            "--recompute-method and --recompute-num-layers need --recompute-granularity full",
        )
    modules = set(precision.recompute_modules or ())
    yield from require(
        not modules or precision.granularity == "selective",
        "--recompute-modules needs --recompute-granularity selective",
    )
    experts = sorted(modules & {"moe", "shared_experts"})
    yield from require(
        not experts or config.model.num_experts is not None,
        f"--recompute-modules {' '.join(experts)} needs --num-experts",
    )
    yield from require(
        "mlp" not in modules or not config.model.add_bias_linear,
        "--recompute-modules mlp needs --disable-bias-linear: megatron-core recomputes no MLP with a bias",
    )


def _batches(config: TrainerConfig) -> Iterator[str]:
    training = config.training
    ramp = training.rampup_batch_size
    yield from require(
        training.global_batch_size is None or training.global_batch_size > 0, "--global-batch-size must be above 0"
    )
    if ramp is None:
        return
    if not (
        yield from require(
            len(ramp) == 3, f"--rampup-batch-size takes three numbers (start, increment, samples), not {len(ramp)}"
        )
    ):
        return
    if not (yield from require(min(ramp) > 0, "--rampup-batch-size takes numbers above 0")):
        return
    goal = training.global_batch_size
    if not (yield from require(goal is not None, "--rampup-batch-size needs --global-batch-size as its goal")):
        return
    assert goal is not None
    yield from require(
        ramp[0] <= goal and (goal - ramp[0]) % ramp[1] == 0,
        f"--rampup-batch-size: {ramp[0]} does not reach --global-batch-size {goal} in steps of {ramp[1]}",
    )


def _intervals(config: TrainerConfig) -> Iterator[str]:
    positive = {
        "--log-interval": config.logging.log_interval,
        "--eval-interval": config.logging.eval_interval,
        "--save-interval": config.checkpoint.save_interval,
        "--keep-last": config.checkpoint.keep_last,
        "--exit-interval": config.training.exit_interval,
        "--tensorboard-log-interval": config.logging.tensorboard_log_interval,
    }
    for flag, value in positive.items():
        yield from require(value is None or value > 0, f"{flag} must be above 0")
    saves = config.checkpoint.save is not None
    yield from require(config.checkpoint.save_interval is None or saves, "--save-interval needs --save DIRECTORY")
    yield from require(not config.checkpoint.async_save or saves, "--async-save needs --save DIRECTORY")
    for flag, text in (
        ("--wandb-entity", config.logging.wandb_entity),
        ("--wandb-exp-name", config.logging.wandb_exp_name),
        ("--wandb-save-dir", config.logging.wandb_save_dir),
    ):
        yield from require(text is None or config.logging.wandb_project is not None, f"{flag} needs --wandb-project")
    yield from require(config.logging.faults is None or config.logging.trace, "--faults needs --trace")
    yield from require(not config.logging.trace_nccl or config.logging.trace, "--trace-nccl needs --trace")


_RULES: tuple[Rule, ...] = (
    trace_problems,
    _attention,
    _positions,
    _shape,
    _accepted_spellings,
    _tensor_parallel,
    _pipeline,
    _stages,
    _dpp,
    fbd_problems,
    _overlap,
    precision_problems,
    _recompute,
    _batches,
    *SCHEDULE_RULES,
    *DATA_RULES,
    tokenizer_problems,
    bert_problems,
    experts_problems,
    graph_problems,
    context_problems,
    _intervals,
    memory_problems,
    watch_problems,
    control_problems,
)
