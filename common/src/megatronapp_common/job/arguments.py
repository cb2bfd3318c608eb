"""A job's fields as flags of the trainer, in Megatron's spelling."""

import dataclasses
import json
from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.api.types import MegatronJob

Value = bool | int | float | str | tuple[object, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class FlagOf:
    """Which flag says a field. A true switch is the flag alone; a field that is left out gives no flag."""

    field: str
    """Path below spec, in Python's spelling."""
    flag: str


FLAGS: tuple[FlagOf, ...] = (
    FlagOf("parallelism.tensor", "--tensor-model-parallel-size"),
    FlagOf("parallelism.pipeline", "--pipeline-model-parallel-size"),
    FlagOf("parallelism.virtual_pipeline", "--num-virtual-stages-per-pipeline-rank"),
    FlagOf("parallelism.first_stage_layers", "--decoder-first-pipeline-num-layers"),
    FlagOf("parallelism.last_stage_layers", "--decoder-last-pipeline-num-layers"),
    FlagOf("parallelism.context", "--context-parallel-size"),
    FlagOf("parallelism.expert", "--expert-model-parallel-size"),
    FlagOf("parallelism.sequence_parallel", "--sequence-parallel"),
    FlagOf("model.num_layers", "--num-layers"),
    FlagOf("model.hidden_size", "--hidden-size"),
    FlagOf("model.num_attention_heads", "--num-attention-heads"),
    FlagOf("model.seq_length", "--seq-length"),
    FlagOf("model.ffn_hidden_size", "--ffn-hidden-size"),
    FlagOf("model.num_query_groups", "--num-query-groups"),
    FlagOf("model.kv_channels", "--kv-channels"),
    FlagOf("model.max_position_embeddings", "--max-position-embeddings"),
    FlagOf("model.position_embedding_type", "--position-embedding-type"),
    FlagOf("model.rotary_base", "--rotary-base"),
    FlagOf("model.rotary_percent", "--rotary-percent"),
    FlagOf("model.normalization", "--normalization"),
    FlagOf("model.norm_epsilon", "--norm-epsilon"),
    FlagOf("model.swiglu", "--swiglu"),
    FlagOf("model.untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
    FlagOf("model.disable_bias_linear", "--disable-bias-linear"),
    FlagOf("model.add_qkv_bias", "--add-qkv-bias"),
    FlagOf("model.attention_dropout", "--attention-dropout"),
    FlagOf("model.hidden_dropout", "--hidden-dropout"),
    FlagOf("model.init_method_std", "--init-method-std"),
    FlagOf("model.transformer_impl", "--transformer-impl"),
    FlagOf("model.vocab_size", "--vocab-size"),
    FlagOf("model.make_vocab_size_divisible_by", "--make-vocab-size-divisible-by"),
    FlagOf("training.micro_batch_size", "--micro-batch-size"),
    FlagOf("training.global_batch_size", "--global-batch-size"),
    FlagOf("training.rampup_batch_size", "--rampup-batch-size"),
    FlagOf("training.train_iters", "--train-iters"),
    FlagOf("training.lr", "--lr"),
    FlagOf("training.min_lr", "--min-lr"),
    FlagOf("training.lr_decay_style", "--lr-decay-style"),
    FlagOf("training.lr_decay_iters", "--lr-decay-iters"),
    FlagOf("training.lr_warmup_iters", "--lr-warmup-iters"),
    FlagOf("training.lr_warmup_fraction", "--lr-warmup-fraction"),
    FlagOf("training.lr_wsd_decay_iters", "--lr-wsd-decay-iters"),
    FlagOf("training.lr_wsd_decay_style", "--lr-wsd-decay-style"),
    FlagOf("training.weight_decay", "--weight-decay"),
    FlagOf("training.start_weight_decay", "--start-weight-decay"),
    FlagOf("training.end_weight_decay", "--end-weight-decay"),
    FlagOf("training.weight_decay_incr_style", "--weight-decay-incr-style"),
    FlagOf("training.clip_grad", "--clip-grad"),
    FlagOf("training.adam_beta1", "--adam-beta1"),
    FlagOf("training.adam_beta2", "--adam-beta2"),
    FlagOf("training.adam_eps", "--adam-eps"),
    FlagOf("training.seed", "--seed"),
    FlagOf("training.use_distributed_optimizer", "--use-distributed-optimizer"),
    FlagOf("training.overlap_grad_reduce", "--overlap-grad-reduce"),
    FlagOf("training.overlap_param_gather", "--overlap-param-gather"),
    FlagOf("training.recompute.granularity", "--recompute-granularity"),
    FlagOf("training.recompute.method", "--recompute-method"),
    FlagOf("training.recompute.num_layers", "--recompute-num-layers"),
    FlagOf("training.calculate_per_token_loss", "--calculate-per-token-loss"),
    FlagOf("training.log_interval", "--log-interval"),
    FlagOf("training.eval_interval", "--eval-interval"),
    FlagOf("training.eval_iters", "--eval-iters"),
    FlagOf("training.exit_interval", "--exit-interval"),
    FlagOf("training.exit_duration_minutes", "--exit-duration-in-mins"),
    FlagOf("training.tensorboard_dir", "--tensorboard-dir"),
    FlagOf("training.manual_gc", "--manual-gc"),
    FlagOf("training.manual_gc_interval", "--manual-gc-interval"),
    FlagOf("training.deterministic", "--deterministic-mode"),
    FlagOf("training.distributed_timeout_minutes", "--distributed-timeout-minutes"),
    FlagOf("data.path", "--data-path"),
    FlagOf("data.mock", "--mock-data"),
    FlagOf("data.split", "--split"),
    FlagOf("data.cache_path", "--data-cache-path"),
    FlagOf("data.tokenizer", "--tokenizer-file"),
    FlagOf("data.vocab_file", "--vocab-file"),
    FlagOf("data.merge_file", "--merge-file"),
    FlagOf("data.eod_mask_loss", "--eod-mask-loss"),
    FlagOf("data.reset_position_ids", "--reset-position-ids"),
    FlagOf("data.reset_attention_mask", "--reset-attention-mask"),
    FlagOf("data.num_workers", "--num-workers"),
    FlagOf("checkpoint.save", "--save"),
    FlagOf("checkpoint.load", "--load"),
    FlagOf("checkpoint.save_interval", "--save-interval"),
    FlagOf("checkpoint.keep", "--keep-last"),
    FlagOf("checkpoint.finetune", "--finetune"),
    FlagOf("checkpoint.exit_on_missing", "--exit-on-missing-checkpoint"),
    FlagOf("dpp.enabled", "--use-dpp"),
    FlagOf("dpp.workload", "--workload"),
    FlagOf("fbd.enabled", "--forward-backward-disaggregating"),
    FlagOf("fbd.ignore_forward_tensor_parallel", "--ignore-forward-tensor-parallel"),
    FlagOf("trace.enabled", "--trace"),
    FlagOf("trace.capacity", "--trace-capacity"),
)

SERVE_FLAGS: tuple[FlagOf, ...] = (
    FlagOf("serve.host", "--host"),
    FlagOf("serve.port", "--port"),
    FlagOf("serve.max_batch", "--max-batch-size"),
    FlagOf("serve.max_tokens", "--max-tokens"),
    FlagOf("serve.max_length", "--max-length"),
    FlagOf("serve.queue_length", "--queue-length"),
    FlagOf("serve.prefill_chunk", "--prefill-chunk"),
    FlagOf("serve.precision", "--precision"),
    FlagOf("scope.plugins", "--scope-plugins"),
)
"""Flags of `megatronapp_trainer.serve` beside those of FLAGS."""

OTHER_FLAGS = {
    "--group-query-attention": "model.num_query_groups",
    "--bf16": "training.precision",
    "--faults": "faults",
}
"""Flags that follow from a field without holding its value."""


REPLACED = {"training.train_iters": "--train-samples"}
"""Fields that a manifest must have, and the flag of `spec.args` that excludes theirs and takes their place."""


def gives(job: MegatronJob, flag: str) -> bool:
    """True if `spec.args` hold this flag."""
    return any(word.partition("=")[0] == flag for word in job.spec.args)


def place_of(job: MegatronJob, flag: str, value: str | None = None) -> str | None:
    """Where a manifest says this flag: in spec.args, which win, else the field that stands for it, even if left out.

    `value` is the one meant where the field is a list. None for a flag that no field stands for.
    """
    given = [index for index, word in enumerate(job.spec.args) if word.partition("=")[0] == flag]
    if given:
        return f"spec.args[{given[-1]}]"
    table = FLAGS if job.spec.mode == "train" else (*FLAGS, *SERVE_FLAGS)
    field = {entry.flag: entry.field for entry in table}.get(flag) or OTHER_FLAGS.get(flag)
    if field is None:
        return None
    place, items = ".".join(["spec", *map(to_camel, field.split("."))]), _value(job.spec, field)
    return f"{place}[{items.index(value)}]" if isinstance(items, tuple) and value in items else place


def megatron_arguments(job: MegatronJob) -> list[str]:
    """The trainer's command line for a job; ``spec.args`` come last, so they win."""
    table = FLAGS if job.spec.mode == "train" else (*FLAGS, *SERVE_FLAGS)
    replaced = {field for field, flag in REPLACED.items() if gives(job, flag)}
    table = tuple(entry for entry in table if entry.field not in replaced)
    words = [word for entry in table for word in _words(entry.flag, _value(job.spec, entry.field))]
    if _value(job.spec, "model.num_query_groups") is not None:
        words.append("--group-query-attention")
    if _value(job.spec, "training.precision") == "bf16":
        words.append("--bf16")
    if job.spec.faults:
        words += ["--faults", json.dumps([fault.to_dict() for fault in job.spec.faults], separators=(",", ":"))]
    return [*words, *job.spec.args]


def _value(spec: Spec, path: str) -> Value:
    """The field at a path; None where a block above it is left out."""
    value: object = spec
    for name in path.split("."):
        value = getattr(value, name, None)
    assert value is None or isinstance(value, bool | int | float | str | tuple)
    return value


def _words(flag: str, value: Value) -> Iterator[str]:
    if value is None or value is False or value == ():
        return
    yield flag
    if isinstance(value, tuple):
        yield from map(str, value)
    elif value is not True:
        yield str(value)
