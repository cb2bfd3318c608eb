"""Types of batches, optimizer, data and checkpoints. An omitted field keeps the trainer's default."""

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
    """Activations that the backward pass recomputes instead of keeping them."""

    granularity: Literal["selective", "full"]
    """Recompute the attention only, or whole layers."""
    method: Literal["uniform", "block"] | None = None
    """Selection of the layers, with full."""
    num_layers: Count | None = None
    """Layers per group (uniform) or in total (block), with full."""


class Training(ManifestModel):
    """Batches, optimizer, schedules, intervals."""

    micro_batch_size: Count
    """Samples of one forward pass."""
    global_batch_size: Count | None = None
    """Samples of one step over all replicas; defaults to one microbatch of each."""
    rampup_batch_size: Annotated[tuple[Count, ...], Field(min_length=3, max_length=3)] | None = None
    """[start, increment, samples]: grow the global batch from start by increment over this number of samples."""
    train_iters: Count
    """Steps of the whole training."""
    lr: Positive
    """Largest learning rate."""
    min_lr: NonNegative | None = None
    """Learning rate at the end of the decay; defaults to 0."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] | None = None
    """Shape of the decay; defaults to linear."""
    lr_decay_iters: Count | None = None
    """Steps of the decay; defaults to trainIters."""
    lr_warmup_iters: Index | None = None
    """Steps of linear warm-up; defaults to 0."""
    lr_warmup_fraction: Decay | None = None
    """Warm-up as a share of the decay, instead of lrWarmupIters."""
    lr_wsd_decay_iters: Count | None = None
    """Steps of the last phase of lrDecayStyle WSD."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] | None = None
    """Shape of the last phase of lrDecayStyle WSD; defaults to exponential."""
    weight_decay: NonNegative | None = None
    """Decoupled weight decay, not on biases and norms; defaults to 0.01."""
    start_weight_decay: NonNegative | None = None
    """First value of an increasing weight decay."""
    end_weight_decay: NonNegative | None = None
    """Last value of an increasing weight decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] | None = None
    """Growth of the weight decay; defaults to constant."""
    clip_grad: NonNegative | None = None
    """Largest norm of all gradients together; 0: no clipping; defaults to 1."""
    adam_beta1: Decay | None = None
    """Decay of the first moment; defaults to 0.9."""
    adam_beta2: Decay | None = None
    """Decay of the second moment; defaults to 0.999."""
    adam_eps: Positive | None = None
    """Term added to the root of the second moment; defaults to 1e-8."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of weights and activations; master weights stay in fp32. With fp16 the loss is scaled."""
    seed: Index | None = None
    """Seed of weights, dropout and data order; defaults to 1234."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the replicas."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass; the default where CUDA graphs replay whole microbatches."""
    overlap_param_gather: bool = False
    """Gather parameters during the forward pass; needs useDistributedOptimizer and overlapGradReduce."""
    recompute: Recompute | None = None
    """Recomputation of activations; defaults to none."""
    calculate_per_token_loss: bool = False
    """Weigh gradients by tokens over the whole batch, not microbatch by microbatch."""
    log_interval: Count | None = None
    """Steps between log lines; defaults to 100."""
    eval_interval: Count | None = None
    """Steps between evaluations; defaults to 1000."""
    eval_iters: Index | None = None
    """Global batches of one evaluation, 0: no evaluation; defaults to 100."""
    exit_interval: Count | None = None
    """End after a step that is a multiple of this number."""
    exit_duration_minutes: Positive | None = None
    """End after this number of minutes."""
    tensorboard_dir: Path | None = None
    """Directory to which event files are written."""
    manual_gc: bool = False
    """Collect garbage at fixed steps, so that all ranks pause together."""
    manual_gc_interval: Index | None = None
    """Steps between collections with manualGc; 0: only before evaluation and saving."""
    deterministic: bool = False
    """Refuse operations whose result depends on timing."""
    distributed_timeout_minutes: Positive | None = None
    """Longest duration of a collective before the process ends; defaults to 10."""


class Data(ManifestModel):
    """Training data and its tokenizer."""

    path: Annotated[tuple[Path, ...], Field(max_length=512)] = ()
    """Prefixes of .bin/.idx files; to blend, a weight before each: ["0.3", "a", "0.7", "b"]."""
    mock: bool = False
    """Use random tokens with a learnable structure instead of files; needs model.vocabSize."""
    split: Annotated[str, Field(max_length=64, pattern=SPLIT_PATTERN)] | None = None
    """Ratio of training, validation and test samples; defaults to 969,30,1."""
    cache_path: Path | None = None
    """Directory for the indices of shuffled samples."""
    tokenizer: Path | None = None
    """A tokenizer.json of the tokenizers library."""
    vocab_file: Path | None = None
    """The vocab.json of a GPT-2 BPE, together with mergeFile; or BERT's vocab.txt."""
    merge_file: Path | None = None
    """The merges.txt of a GPT-2 BPE, together with vocabFile."""
    tokenizer_type: Literal["BertWordPieceLowerCase", "BertWordPieceCase"] | None = None
    """Kind of BERT's WordPiece."""
    eod_mask_loss: bool = False
    """Compute no loss where the input is the end of a document."""
    reset_position_ids: bool = False
    """Restart positions at 0 in each document."""
    reset_attention_mask: bool = False
    """Limit attention to each document."""
    sft: bool = False
    """Files of path hold conversations; the loss counts answers only."""
    num_workers: Index | None = None
    """Threads that read in advance; defaults to 2."""
    volume: Volume | None = None
    """A volume claim with the files, on a cluster."""


class Checkpoint(ManifestModel):
    """Saving and loading of the training."""

    save: Path | None = None
    """Directory to write to."""
    load: Path | None = None
    """Directory to read from, where save holds no checkpoint."""
    save_interval: Count | None = None
    """Steps between checkpoints."""
    async_save: bool = False
    """Write checkpoints while training continues."""
    memory_save_interval: Count | None = None
    """Steps between saves in the memory of workers, each with a copy on the next worker; needs restart: InPlace."""
    keep: Count | None = None
    """Number of newest checkpoints to keep, at least 2; defaults to all."""
    finetune: bool = False
    """Read weights only from load: start at step 0 with a fresh optimizer. Checkpoints in save are resumed whole."""
    exit_on_missing: bool = False
    """Fail where load holds no checkpoint, instead of starting from scratch."""
    volume: Volume | None = None
    """A volume claim for the checkpoints, on a cluster."""
