"""Batches, optimizer, data, checkpoints and logs."""

import dataclasses

from megatronapp_trainer.config.fields import option, turned_off_by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Batches and length of training."""

    micro_batch_size: int = option(0, "samples of one forward pass (required)")
    global_batch_size: int | None = option(None, "samples of one step over all replicas; default: one microbatch each")
    rampup_batch_size: tuple[int, ...] | None = option(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES samples"
    )
    train_iters: int = option(0, "steps of the whole training (this or --train-samples is required)")
    train_samples: int | None = option(
        None,
        "samples of the whole training, instead of --train-iters; no step begins that would exceed them",
    )
    seed: int = option(1234, "of weights, dropout and data order", bounds="[0, 4294967295]")
    calculate_per_token_loss: bool = option(
        False,
        "weigh gradients by tokens over the whole batch; by default each microbatch weighs the same in gradients, "
        "however few of its tokens count, while the reported loss is always a mean over tokens",
    )
    check_for_nan: bool = turned_off_by("--no-check-for-nan-in-loss-and-grad", "train on when a loss is NaN or Inf")
    exit_interval: int | None = option(None, "end after a step that is a multiple of this")
    exit_duration_in_mins: float | None = option(None, "end after this many minutes", bounds="(0, inf)")
    manual_gc: bool = option(False, "collect garbage at fixed steps, so that all ranks pause together")
    manual_gc_interval: int = option(
        0, "steps between collections with --manual-gc; 0: only before evaluation and saving", bounds="[0, inf)"
    )
    manual_gc_eval: bool = turned_off_by("--no-manual-gc-eval", "no collection around evaluation with --manual-gc")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and its schedules."""

    optimizer: str = option("adam", "kind", choices=("adam",))
    lr: float = option(0.0, "largest learning rate (required)")
    min_lr: float = option(0.0, "where the decay ends", bounds="[0, inf)")
    lr_decay_style: str = option(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "steps of the decay; default: --train-iters", bounds="[1, inf)")
    lr_decay_samples: int | None = option(
        None, "samples of the decay, with --train-samples; default: --train-samples", bounds="[1, inf)"
    )
    lr_warmup_iters: int = option(0, "steps of linear warm-up", bounds="[0, inf)")
    lr_warmup_samples: int = option(0, "samples of linear warm-up, with --train-samples", bounds="[0, inf)")
    lr_warmup_fraction: float | None = option(None, "warm-up as a share of the decay, instead of --lr-warmup-iters")
    lr_warmup_init: float = option(0.0, "where the warm-up begins", bounds="[0, inf)")
    lr_wsd_decay_style: str = option(
        "exponential", "last phase of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = option(None, "steps of WSD's last phase", bounds="[1, inf)")
    lr_wsd_decay_samples: int | None = option(
        None, "samples of WSD's last phase, with --train-samples", bounds="[1, inf)"
    )
    weight_decay: float = option(0.01, "decoupled weight decay; not on biases and norms", bounds="[0, inf)")
    start_weight_decay: float | None = option(None, "where an increasing weight decay begins", bounds="[0, inf)")
    end_weight_decay: float | None = option(None, "where it ends", bounds="[0, inf)")
    weight_decay_incr_style: str = option("constant", "how it grows", choices=("constant", "linear", "cosine"))
    clip_grad: float = option(
        1.0, "largest norm of all gradients together; 0: no clipping, the norm is only logged", bounds="[0, inf)"
    )
    adam_beta1: float = option(0.9, "decay of the first moment", bounds="[0, 1)")
    adam_beta2: float = option(0.999, "decay of the second moment", bounds="[0, 1)")
    adam_eps: float = option(1e-8, "added to the root of the second moment", bounds="[0, inf)")
    decoupled_lr: float | None = option(None, "learning rate of input and output embedding", bounds="(0, inf)")
    decoupled_min_lr: float | None = option(None, "where its decay ends", bounds="[0, inf)")
    override_opt_param_scheduler: bool = option(
        False,
        "schedules from the flags, not from the checkpoint",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "schedules from the checkpoint, not from the flags",
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Training data and tokenizer."""

    data_path: tuple[str, ...] | None = option(None, "prefix of .bin/.idx, or WEIGHT PREFIX pairs to blend")
    train_data_path: tuple[str, ...] | None = option(None, "as --data-path, for training only")
    valid_data_path: tuple[str, ...] | None = option(None, "as --data-path, for validation only")
    test_data_path: tuple[str, ...] | None = option(None, "as --data-path, for the test only")
    split: str | None = option(None, "shares of training, validation, test; default 969,30,1")
    data_cache_path: str | None = option(None, "directory for indices of shuffled samples")
    mock_data: bool = option(False, "random tokens with a learnable structure; needs --vocab-size")
    num_workers: int = option(2, "threads that read ahead", bounds="[0, inf)")
    mmap_bin_files: bool = turned_off_by("--no-mmap-bin-files", "read .bin files instead of mapping them")
    eod_mask_loss: bool = option(False, "no loss where the input is the end of a document")
    reset_position_ids: bool = option(False, "positions begin at 0 in each document")
    reset_attention_mask: bool = option(False, "attention stays within a document")
    tokenizer_file: str | None = option(
        None, "tokenizer.json of the tokenizers library, or its folder", aliases=("--tokenizer-model",)
    )
    tokenizer_type: str | None = option(
        None,
        "accepted if the files are of this type: GPT2BPETokenizer (--vocab-file and --merge-file) or "
        "HuggingFaceTokenizer (--tokenizer-file)",
    )
    vocab_file: str | None = option(None, "vocab.json of a GPT-2 BPE")
    merge_file: str | None = option(None, "merges.txt of a GPT-2 BPE")
    vocab_size: int | None = option(None, "tokens before padding; default: the tokenizer's", bounds="[1, inf)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: str | None = option(None, "directory to write to")
    load: str | None = option(None, "directory to read from; default: --save if it holds a checkpoint")
    save_interval: int | None = option(None, "steps between checkpoints", aliases=("--persistent-save-interval",))
    keep_last: int | None = option(None, "newest checkpoints to keep, never fewer than 2; default: all")
    save_optim: bool = turned_off_by("--no-save-optim", "leave the optimizer out")
    save_rng: bool = turned_off_by("--no-save-rng", "leave the random states out")
    load_optim: bool = turned_off_by("--no-load-optim", "do not read the optimizer")
    load_rng: bool = turned_off_by("--no-load-rng", "do not read the random states")
    finetune: bool = option(False, "weights only: start at step 0 with a fresh optimizer")
    exit_on_missing_checkpoint: bool = option(False, "fail if --load has no checkpoint")
    ckpt_format: str = option("torch_dist", "format", choices=("torch_dist",), aliases=("--dist-ckpt-format",))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Logs and evaluation during training."""

    log_interval: int = option(100, "steps between log lines")
    eval_interval: int = option(1000, "steps between evaluations")
    eval_iters: int = option(100, "global batches of one evaluation; 0: no evaluation", bounds="[0, inf)")
    skip_train: bool = option(False, "evaluate only")
    tensorboard_dir: str | None = option(None, "write event files there")
    tensorboard_log_interval: int = option(1, "steps between events")
    trace: bool = option(False, "record spans into the trace ring")
    trace_capacity: int = option(65536, "records of the trace ring", bounds="[1, inf)")
    faults: str | None = option(None, "JSON list of faults for demonstration; needs --trace")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FixedConfig:
    """Flags of fixed behaviour, accepted so that command lines for Megatron run unchanged."""

    exit_signal_handler: bool = option(False, "SIGTERM saves at the next step boundary and ends with code 75")
    log_throughput: bool = option(False, "log lines include TFLOP/s")
    use_mcore_models: bool = option(False, "models are megatron-core's")
    use_cpu_initialization: bool = option(False, "initial weights do not depend on the layout")
    accumulate_allreduce_grads_in_fp32: bool = option(False, "gradients are accumulated and reduced in fp32")
    use_dist_ckpt: bool = option(False, "checkpoints are distributed ones")
    auto_detect_ckpt_format: bool = option(False, "the format is read from the checkpoint")
    no_ckpt_fully_parallel_save: bool = option(False, "each shard is written by one replica")
    log_timers_to_tensorboard: bool = option(False, "event files have the time of each step")
    log_batch_size_to_tensorboard: bool = option(False, "event files have the batch size")
    log_validation_ppl_to_tensorboard: bool = option(False, "event files have the perplexity of evaluations")
    no_barrier_with_level_1_timing: bool = option(False, "no timer has a barrier")
    no_rope_fusion: bool = option(False, "Transformer Engine's rotary kernel is not used")
    dataloader_type: str = option("single", "samples are read in one order", choices=("single",))
    no_masked_softmax_fusion: bool = option(False, "Megatron's own softmax kernels are not used")
    no_bias_gelu_fusion: bool = option(False, "bias and GELU are apart")
    no_bias_swiglu_fusion: bool = option(False, "bias and SwiGLU are apart")
    no_bias_dropout_fusion: bool = option(False, "bias and dropout are apart")
    no_gradient_accumulation_fusion: bool = option(False, "Apex's kernels are not used")
    no_persist_layer_norm: bool = option(False, "Apex's kernels are not used")
    no_create_attention_mask_in_dataloader: bool = option(False, "masks are made only for --reset-attention-mask")
