"""Batches, optimizer, data and checkpoints. A field that is left out keeps the trainer's default."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.cluster import Volume
from megatronapp_common.job.api.model import Count

SPLIT_PATTERN = r"^\s*[0-9.]+\s*(,\s*[0-9.]+\s*){0,2}$"
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Index = Annotated[int, Field(ge=0, le=2_147_483_647)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]


class Recompute(ManifestModel):
    """What the backward pass computes again instead of keeping it."""

    granularity: Literal["selective", "full"]
    """The attention only, or whole layers."""
    method: Literal["uniform", "block"] | None = None
    """Which layers, with full."""
    num_layers: Count | None = None
    """Layers per group (uniform) or in all (block), with full."""


class Training(ManifestModel):
    """Batches, optimizer, schedules, intervals."""

    micro_batch_size: Count
    """Samples of one forward pass."""
    global_batch_size: Count | None = None
    """Samples of one step over all replicas; left out: one microbatch of each."""
    rampup_batch_size: Annotated[tuple[Count, ...], Field(min_length=3, max_length=3)] | None = None
    """[start, increment, samples]: grow the global batch from start by increment over so many samples."""
    train_iters: Count
    """Steps of the whole training."""
    lr: Positive
    """Largest learning rate."""
    min_lr: NonNegative | None = None
    """Where the decay ends; left out: 0."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] | None = None
    """Shape of the decay; left out: linear."""
    lr_decay_iters: Count | None = None
    """Steps of the decay; left out: trainIters."""
    lr_warmup_iters: Index | None = None
    """Steps of linear warm-up; left out: 0."""
    lr_warmup_fraction: Decay | None = None
    """Warm-up as a share of the decay, instead of lrWarmupIters."""
    lr_wsd_decay_iters: Count | None = None
    """Steps of the last phase of lrDecayStyle WSD."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] | None = None
    """Shape of the last phase of lrDecayStyle WSD; left out: exponential."""
    weight_decay: NonNegative | None = None
    """Decoupled weight decay, not on biases and norms; left out: 0.01."""
    start_weight_decay: NonNegative | None = None
    """Where an increasing weight decay begins."""
    end_weight_decay: NonNegative | None = None
    """Where an increasing weight decay ends."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] | None = None
    """How the weight decay grows; left out: constant."""
    clip_grad: NonNegative | None = None
    """Largest norm of all gradients together; 0: no clipping; left out: 1."""
    adam_beta1: Decay | None = None
    """Decay of the first moment; left out: 0.9."""
    adam_beta2: Decay | None = None
    """Decay of the second moment; left out: 0.999."""
    adam_eps: Positive | None = None
    """Added to the root of the second moment; left out: 1e-8."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Weights and activations; with bf16, master weights and gradient reduction stay in fp32."""
    seed: Index | None = None
    """Of weights, dropout and data order; left out: 1234."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the replicas."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass goes on; needs useDistributedOptimizer and overlapGradReduce."""
    recompute: Recompute | None = None
    """Recomputation of activations; left out: none."""
    calculate_per_token_loss: bool = False
    """Weigh gradients by tokens over the whole batch, not microbatch by microbatch."""
    log_interval: Count | None = None
    """Steps between log lines; left out: 100."""
    eval_interval: Count | None = None
    """Steps between evaluations; left out: 1000."""
    eval_iters: Index | None = None
    """Global batches of one evaluation, 0: no evaluation; left out: 100."""
    exit_interval: Count | None = None
    """End after a step that is a multiple of this."""
    exit_duration_minutes: Positive | None = None
    """End after so many minutes."""
    tensorboard_dir: Path | None = None
    """Write event files there."""
    manual_gc: bool = False
    """Collect garbage at fixed steps, so that all ranks pause together."""
    manual_gc_interval: Index | None = None
    """Steps between collections with manualGc; 0: only before evaluation and saving."""
    deterministic: bool = False
    """Refuse operations whose result depends on timing."""
    distributed_timeout_minutes: Positive | None = None
    """A collective that takes longer ends the process; left out: 10."""


class Data(ManifestModel):
    """What is trained on."""

    path: Annotated[tuple[Path, ...], Field(max_length=512)] = ()
    """Prefixes of .bin/.idx files; to blend, a weight before each: ["0.3", "a", "0.7", "b"]."""
    mock: bool = False
    """Random tokens with a learnable structure instead of files; needs model.vocabSize."""
    split: Annotated[str, Field(max_length=64, pattern=SPLIT_PATTERN)] | None = None
    """Shares of training, validation and test; left out: 969,30,1."""
    cache_path: Path | None = None
    """Where indices of shuffled samples are kept."""
    tokenizer: Path | None = None
    """A tokenizer.json of the tokenizers library."""
    vocab_file: Path | None = None
    """The vocab.json of a GPT-2 BPE, together with mergeFile."""
    merge_file: Path | None = None
    """The merges.txt of a GPT-2 BPE, together with vocabFile."""
    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""
    reset_position_ids: bool = False
    """Positions count anew in each document."""
    reset_attention_mask: bool = False
    """Attention stays within a document."""
    num_workers: Index | None = None
    """Threads that read ahead; left out: 2."""
    volume: Volume | None = None
    """A volume claim with the files, on a cluster."""


class Checkpoint(ManifestModel):
    """Where and when the training is saved."""

    save: Path | None = None
    """Directory to write to."""
    load: Path | None = None
    """Directory to read from; left out: save, if it holds a checkpoint."""
    save_interval: Count | None = None
    """Steps between checkpoints."""
    keep: Count | None = None
    """Newest checkpoints to keep, never fewer than 2; left out: all."""
    finetune: bool = False
    """Weights only: start at step 0 with a fresh optimizer."""
    exit_on_missing: bool = False
    """Fail where load holds no checkpoint, instead of starting from scratch."""
    volume: Volume | None = None
    """A volume claim for the checkpoints, on a cluster."""
