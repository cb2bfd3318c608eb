"""What a configuration must hold to be trained, apart from what depends on the number of ranks."""

from collections.abc import Callable

from megatronapp_trainer.config.model import ModelConfig
from megatronapp_trainer.config.root import TrainerConfig
from megatronapp_trainer.errors import UsageError, UsageErrors


def check(config: TrainerConfig) -> None:
    """Raise UsageErrors that names every rule that the configuration breaks."""
    problems = _broken(_FIRST_RULES, config) or _broken(_RULES, config)
    if problems:
        raise UsageErrors(problems)


def _broken(rules: tuple[Callable[[TrainerConfig], None], ...], config: TrainerConfig) -> list[str]:
    problems: list[str] = []
    for rule in rules:
        try:
            rule(config)
        except UsageError as error:
            problems += error.problems if isinstance(error, UsageErrors) else [str(error)]
    return problems


def check_world(config: TrainerConfig, data_size: int) -> None:
    """Raise UsageError if the global batch does not fit this number of replicas."""
    batch, stride = config.global_batch_size(data_size), config.training.micro_batch_size * data_size
    _require(
        batch % stride == 0,
        f"--global-batch-size {batch} is not a multiple of --micro-batch-size {config.training.micro_batch_size} "
        f"x {data_size} replicas; take a multiple of {stride}",
    )
    if config.training.rampup_batch_size is not None:
        start, increment, _ = config.training.rampup_batch_size
        _require(
            start % stride == 0 and increment % stride == 0,
            f"--rampup-batch-size: start {start} and increment {increment} must be multiples of {stride} "
            f"(--micro-batch-size x replicas)",
        )
    pipeline = config.parallel.pipeline_model_parallel_size
    sizes = (batch, *(config.training.rampup_batch_size or ())[:2])
    if config.virtual_size > 1:
        _require(
            all(size // stride % pipeline == 0 for size in sizes),
            f"the interleaved schedule needs a multiple of --pipeline-model-parallel-size {pipeline} microbatches "
            f"in each step; take batch sizes that are multiples of {stride * pipeline}",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _required_flags(config: TrainerConfig) -> None:
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
    missing = [flag for flag, value in needed.items() if not value > 0]
    if missing:
        raise UsageErrors([f"{flag} is missing or not positive; give it a value above 0" for flag in missing])


def _group_sizes(config: TrainerConfig) -> None:
    """Before the rules that divide by them."""
    parallel = config.parallel
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        "--num-layers-per-virtual-pipeline-stage": parallel.num_layers_per_virtual_pipeline_stage,
        "--num-query-groups": config.model.num_query_groups,
        "--make-vocab-size-divisible-by": config.model.make_vocab_size_divisible_by,
    }
    for flag, size in sizes.items():
        _require(size is None or size > 0, f"{flag} must be 1 or more")


def _attention(config: TrainerConfig) -> None:
    model, tensor = config.model, config.parallel.tensor_model_parallel_size
    _require(
        model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0,
        f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {model.num_attention_heads}",
    )
    _require(
        model.num_attention_heads % model.heads_of_keys == 0,
        f"--num-attention-heads {model.num_attention_heads} is not a multiple of "
        f"--num-query-groups {model.heads_of_keys}",
    )
    heads, groups = model.num_attention_heads, model.heads_of_keys
    _require(
        heads % tensor == 0,
        f"--num-attention-heads ({heads}) must be a multiple of --tensor-model-parallel-size {tensor}",
    )
    _require(
        groups % tensor == 0 or tensor % groups == 0,
        f"key heads ({groups}) must be a multiple or a divisor of --tensor-model-parallel-size {tensor}",
    )
    rows = (heads + 2 * groups) * model.head_width
    _require(
        rows % tensor == 0,
        f"the {rows} rows of query, key and value cannot be split over --tensor-model-parallel-size {tensor}",
    )


def _positions(config: TrainerConfig) -> None:
    model, data = config.model, config.data
    _require(
        model.positions >= model.seq_length,
        f"--max-position-embeddings {model.positions} is below --seq-length {model.seq_length}",
    )
    _require(
        not (data.reset_position_ids and model.position_embedding_type == "rope"),
        "--reset-position-ids has no effect on rotary positions, which are relative; leave it out or take "
        "--position-embedding-type learned_absolute",
    )


def _shape(config: TrainerConfig) -> None:
    model = config.model
    _require(
        not (model.openai_gelu and model.swiglu), "--openai-gelu and --swiglu are both activations of the MLP; give one"
    )
    _require(
        not model.use_rope_scaling or model.position_embedding_type == "rope",
        "--use-rope-scaling needs --position-embedding-type rope",
    )
    for flag, value in (("--rotary-base", model.rotary_base), ("--rope-scaling-factor", model.rope_scaling_factor)):
        _require(value > 0, f"{flag} must be above 0")
    _require(
        _is_window(model),
        f"--window-size {model.window_size}: write --window-size 1023,0 for 1,024 tokens, the token itself among them; "
        "the first number is 0 or more (-1: all), the second is 0, because a token of this model never looks ahead",
    )


def _accepted_spellings(config: TrainerConfig) -> None:
    """Flags of Megatron that choose what is taken here anyway must choose that."""
    model, data = config.model, config.data
    local = model.transformer_impl == "local"
    for flag, on in (
        ("--use-flash-attn", model.use_flash_attn),
        ("--attention-backend flash", model.attention_backend == "flash"),
    ):
        _require(not (on and local), f"{flag} and --transformer-impl local exclude each other; omit one")
    _require(model.attention_backend != "local" or local, "--attention-backend local needs --transformer-impl local")
    kind = data.tokenizer_type
    if kind is None:
        return
    _require(
        kind in _TOKENIZER_TYPES,
        f"--tokenizer-type {kind} is not supported; {_TOKENIZER_ADVICE.get(kind, _NO_SUCH_TOKENIZER)}",
    )
    needed, given = _TOKENIZER_TYPES[kind], {data.tokenizer_file: "--tokenizer-file", data.vocab_file: "--vocab-file"}
    found = [flag for value, flag in given.items() if value is not None]
    _require(
        not found or bool(set(found) & set(needed)),
        f"--tokenizer-type {kind} and {' '.join(found)} exclude each other; omit the type: the files say it",
    )


_TOKENIZER_TYPES = {
    "GPT2BPETokenizer": ("--vocab-file", "--tokenizer-file"),
    "HuggingFaceTokenizer": ("--tokenizer-file",),
}
_NO_SUCH_TOKENIZER = "give --tokenizer-file tokenizer.json, or --vocab-file and --merge-file of a GPT-2 BPE"
_TOKENIZER_ADVICE = {
    "NullTokenizer": "Megatron adds one token to its --vocab-size N: omit the type, and give --vocab-size N + 1",
}


def _is_window(model: ModelConfig) -> bool:
    try:
        window = model.window
    except ValueError:
        return False
    return window is None or (window[0] >= -1 and window[1] == 0)


def _tensor_parallel(config: TrainerConfig) -> None:
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    _require(
        not parallel.sequence_parallel or tensor > 1, "--sequence-parallel needs --tensor-model-parallel-size above 1"
    )
    _require(
        not parallel.sequence_parallel or model.seq_length % tensor == 0,
        f"--sequence-parallel: --seq-length {model.seq_length} must be a multiple of "
        f"--tensor-model-parallel-size {tensor}",
    )
    _require(
        model.make_vocab_size_divisible_by % tensor == 0,
        f"--make-vocab-size-divisible-by {model.make_vocab_size_divisible_by} must be a multiple of "
        f"--tensor-model-parallel-size {tensor}: the padded vocabulary does not depend on the layout",
    )
    _require(
        model.mlp_width % tensor == 0,
        f"--ffn-hidden-size {model.mlp_width} must be a multiple of --tensor-model-parallel-size {tensor}",
    )
    for flag, size in (
        ("--context-parallel-size", parallel.context_parallel_size),
        ("--expert-model-parallel-size", parallel.expert_model_parallel_size),
    ):
        _require(size == 1, f"{flag} {size} is not supported yet; only 1 is")


def _pipeline(config: TrainerConfig) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    pipeline, virtual = parallel.pipeline_model_parallel_size, config.virtual_size
    _require(
        parallel.num_virtual_stages_per_pipeline_rank is None or parallel.num_layers_per_virtual_pipeline_stage is None,
        "give --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank, not both",
    )
    _require(virtual > 0, f"--num-layers {layers} cannot be divided into {pipeline} stages of 0 chunks")
    _require(virtual == 1 or pipeline > 1, "an interleaved schedule needs --pipeline-model-parallel-size above 1")


def _stages(config: TrainerConfig) -> None:
    """How many layers each stage has."""
    parallel, layers = config.parallel, config.model.num_layers
    pipeline, virtual = parallel.pipeline_model_parallel_size, config.virtual_size
    ends = {
        "--decoder-first-pipeline-num-layers": parallel.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": parallel.decoder_last_pipeline_num_layers,
    }
    given = [flag for flag, value in ends.items() if value is not None]
    if virtual < 1:  # another rule says so
        return
    for flag in given:
        _require(pipeline > 1, f"{flag} needs --pipeline-model-parallel-size above 1")
        value = ends[flag] or 0
        _require(value > 0, f"{flag} must be above 0")
        _require(value % virtual == 0, f"{flag} {value} cannot be divided into {virtual} chunks")
    _require(
        not given or parallel.num_layers_per_virtual_pipeline_stage is None,
        f"{' and '.join(given)}: give --num-virtual-stages-per-pipeline-rank "
        "instead of --num-layers-per-virtual-pipeline-stage",
    )
    counted = {
        "--account-for-embedding-in-pipeline-split": parallel.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": parallel.account_for_loss_in_pipeline_split,
    }
    for flag, on in counted.items():
        _require(not on or pipeline > 1, f"{flag} needs --pipeline-model-parallel-size above 1")
        _require(not (on and given), f"{flag} and {' and '.join(given)} exclude each other")
    _require(_fits(parallel.stage_layers, layers, virtual), _how_to_cut(config, given))


def _fits(stage_layers: Callable[[int], tuple[int, ...]], layers: int, virtual: int) -> bool:
    try:
        return all(count > 0 and count % virtual == 0 for count in stage_layers(layers))
    except ValueError:
        return False


def _how_to_cut(config: TrainerConfig, given: list[str]) -> str:
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


def _overlap(config: TrainerConfig) -> None:
    parallel = config.parallel
    _require(
        not parallel.overlap_param_gather or parallel.use_distributed_optimizer,
        "--overlap-param-gather needs --use-distributed-optimizer",
    )
    _require(
        not parallel.overlap_param_gather or parallel.overlap_grad_reduce,
        "--overlap-param-gather needs --overlap-grad-reduce",
    )
    _require(
        not (parallel.ddp_average_in_collective and config.training.calculate_per_token_loss),
        "--ddp-average-in-collective and --calculate-per-token-loss exclude each other: gradients are then divided by "
        "tokens, after the collective",
    )


def _recompute(config: TrainerConfig) -> None:
    precision = config.precision
    if precision.granularity == "full":
        _require(
            precision.recompute_method is not None and precision.recompute_num_layers is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )
    else:
        _require(
            precision.recompute_method is None and precision.recompute_num_layers is None,
            "--recompute-method and --recompute-num-layers need --recompute-granularity full",
        )


def _batches(config: TrainerConfig) -> None:
    training = config.training
    ramp = training.rampup_batch_size
    _require(
        training.global_batch_size is None or training.global_batch_size > 0, "--global-batch-size must be above 0"
    )
    if ramp is None:
        return
    _require(len(ramp) == 3, f"--rampup-batch-size takes three numbers (start, increment, samples), not {len(ramp)}")
    _require(min(ramp) > 0, "--rampup-batch-size takes numbers above 0")
    goal = training.global_batch_size
    _require(goal is not None, "--rampup-batch-size needs --global-batch-size as its goal")
    assert goal is not None
    _require(
        ramp[0] <= goal and (goal - ramp[0]) % ramp[1] == 0,
        f"--rampup-batch-size: {ramp[0]} does not reach --global-batch-size {goal} in steps of {ramp[1]}",
    )


def _lengths(config: TrainerConfig) -> None:
    """Lengths are given in steps or in samples, all in the same."""
    training, optimizer = config.training, config.optimizer
    steps = {
        "--lr-decay-iters": optimizer.lr_decay_iters,
        "--lr-warmup-iters": optimizer.lr_warmup_iters,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
    }
    samples = {
        "--lr-decay-samples": optimizer.lr_decay_samples,
        "--lr-warmup-samples": optimizer.lr_warmup_samples,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
    }
    if training.train_samples is None:
        for flag, value in samples.items():
            _require(not value, f"{flag} needs --train-samples; with --train-iters give {_in_steps(flag)}")
        return
    _require(training.train_iters == 0, "give --train-iters or --train-samples, not both")
    for flag, value in steps.items():
        instead = flag.replace("iters", "samples")
        _require(not value, f"{flag} cannot be combined with --train-samples; give {instead} instead")
    batch = training.global_batch_size
    _require(batch is not None, "--train-samples needs --global-batch-size, which says how many steps they are")
    first = batch if training.rampup_batch_size is None else training.rampup_batch_size[0]
    _require(
        first is not None and training.train_samples >= first,
        f"--train-samples {training.train_samples} is less than one step of {first}",
    )
    decay = optimizer.lr_decay_samples or training.train_samples
    _require(
        optimizer.lr_warmup_samples < decay,
        f"--lr-warmup-samples {optimizer.lr_warmup_samples} must be below the {decay} samples of the decay",
    )


def _in_steps(flag: str) -> str:
    return flag.replace("samples", "iters")


def _schedules(config: TrainerConfig) -> None:
    optimizer, steps = config.optimizer, config.optimizer.lr_decay_iters or config.training.train_iters
    _require(optimizer.min_lr <= optimizer.lr, f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}")
    _require(optimizer.lr_warmup_init <= optimizer.lr, "--lr-warmup-init is above --lr")
    fraction = optimizer.lr_warmup_fraction
    _require(fraction is None or 0 <= fraction < 1, "--lr-warmup-fraction must lie in [0, 1)")
    _require(
        fraction is None or optimizer.lr_warmup_iters == 0, "give --lr-warmup-fraction or --lr-warmup-iters, not both"
    )
    _require(
        fraction is None or optimizer.lr_warmup_samples == 0,
        "give --lr-warmup-fraction or --lr-warmup-samples, not both",
    )
    _require(
        config.training.train_samples is not None or optimizer.lr_warmup_iters < steps,
        f"--lr-warmup-iters {optimizer.lr_warmup_iters} must be below the {steps} steps of the decay",
    )
    _require(
        optimizer.lr_decay_style != "WSD" or bool(optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples),
        "--lr-decay-style WSD needs --lr-wsd-decay-iters (with --train-samples: --lr-wsd-decay-samples)",
    )
    growing = optimizer.weight_decay_incr_style != "constant"
    given = (optimizer.start_weight_decay is not None, optimizer.end_weight_decay is not None)
    _require(
        all(given) if growing else not any(given),
        "--start-weight-decay and --end-weight-decay belong to --weight-decay-incr-style linear or cosine",
    )
    _require(
        not (optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler),
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other",
    )


def _data(config: TrainerConfig) -> None:
    data = config.data
    split_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    paths = data.data_path is not None or any(path is not None for path in split_paths)
    _require(
        data.mock_data or paths,
        "no training data: give --data-path PREFIX (see `megatronapp data prepare`) or --mock-data",
    )
    _require(not (data.mock_data and paths), "--mock-data and a data path exclude each other")
    _require(not data.mock_data or data.vocab_size is not None, "--mock-data needs --vocab-size")
    for flag, on in (
        ("--reset-attention-mask", data.reset_attention_mask),
        ("--reset-position-ids", data.reset_position_ids),
    ):
        _require(not (data.mock_data and on), f"{flag}: samples of --mock-data hold no documents; leave it out")
    _require(
        data.data_path is None or not any(path is not None for path in split_paths),
        "give --data-path with --split, or the three of --train-data-path, --valid-data-path and --test-data-path",
    )
    _require(
        (data.vocab_file is None) == (data.merge_file is None),
        "--vocab-file and --merge-file belong together",
    )


def _intervals(config: TrainerConfig) -> None:
    positive = {
        "--log-interval": config.logging.log_interval,
        "--eval-interval": config.logging.eval_interval,
        "--save-interval": config.checkpoint.save_interval,
        "--keep-last": config.checkpoint.keep_last,
        "--exit-interval": config.training.exit_interval,
        "--tensorboard-log-interval": config.logging.tensorboard_log_interval,
    }
    for flag, value in positive.items():
        _require(value is None or value > 0, f"{flag} must be above 0")
    _require(
        config.checkpoint.save_interval is None or config.checkpoint.save is not None,
        "--save-interval needs --save DIRECTORY",
    )
    _require(config.logging.faults is None or config.logging.trace, "--faults needs --trace")


_FIRST_RULES: tuple[Callable[[TrainerConfig], None], ...] = (_required_flags, _group_sizes)
"""Without these the others cannot be judged."""
_RULES: tuple[Callable[[TrainerConfig], None], ...] = (
    _attention,
    _positions,
    _shape,
    _accepted_spellings,
    _tensor_parallel,
    _pipeline,
    _stages,
    _overlap,
    _recompute,
    _batches,
    _lengths,
    _schedules,
    _data,
    _intervals,
)
