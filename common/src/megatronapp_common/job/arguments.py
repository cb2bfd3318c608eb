"""Conversion of a job's fields to flags of the trainer, in Megatron's spelling."""

import dataclasses
import json
from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from megatronapp_common.job.api.spec import Spec
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.world import derive_world

Value = bool | int | float | str | tuple[object, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class FlagMapping:
    """A field and its flag. A true switch is the flag alone; an absent field has no flag."""

    field: str
    """Path of the field below spec, in Python's spelling."""
    flag: str
    default: int | str | None = None
    """Value of the field that is given as no flag, because it is the trainer's default."""


FLAGS: tuple[FlagMapping, ...] = (
    FlagMapping("parallelism.tensor", "--tensor-model-parallel-size"),
    FlagMapping("parallelism.pipeline", "--pipeline-model-parallel-size"),
    FlagMapping("parallelism.virtual_pipeline", "--num-virtual-stages-per-pipeline-rank"),
    FlagMapping("parallelism.first_stage_layers", "--decoder-first-pipeline-num-layers"),
    FlagMapping("parallelism.last_stage_layers", "--decoder-last-pipeline-num-layers"),
    FlagMapping("parallelism.context", "--context-parallel-size"),
    FlagMapping("parallelism.expert", "--expert-model-parallel-size"),
    FlagMapping("parallelism.sequence_parallel", "--sequence-parallel"),
    FlagMapping("model.type", "--model-type", default="gpt"),
    FlagMapping("model.num_layers", "--num-layers"),
    FlagMapping("model.hidden_size", "--hidden-size"),
    FlagMapping("model.num_attention_heads", "--num-attention-heads"),
    FlagMapping("model.seq_length", "--seq-length"),
    FlagMapping("model.ffn_hidden_size", "--ffn-hidden-size"),
    FlagMapping("model.num_query_groups", "--num-query-groups"),
    FlagMapping("model.kv_channels", "--kv-channels"),
    FlagMapping("model.max_position_embeddings", "--max-position-embeddings"),
    FlagMapping("model.position_embedding_type", "--position-embedding-type"),
    FlagMapping("model.rotary_base", "--rotary-base"),
    FlagMapping("model.rotary_percent", "--rotary-percent"),
    FlagMapping("model.normalization", "--normalization"),
    FlagMapping("model.norm_epsilon", "--norm-epsilon"),
    FlagMapping("model.swiglu", "--swiglu"),
    FlagMapping("model.untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights"),
    FlagMapping("model.disable_bias_linear", "--disable-bias-linear"),
    FlagMapping("model.add_qkv_bias", "--add-qkv-bias"),
    FlagMapping("model.attention_dropout", "--attention-dropout"),
    FlagMapping("model.hidden_dropout", "--hidden-dropout"),
    FlagMapping("model.init_method_std", "--init-method-std"),
    FlagMapping("model.transformer_impl", "--transformer-impl"),
    FlagMapping("model.vocab_size", "--vocab-size"),
    FlagMapping("model.make_vocab_size_divisible_by", "--make-vocab-size-divisible-by"),
    FlagMapping("training.micro_batch_size", "--micro-batch-size"),
    FlagMapping("training.global_batch_size", "--global-batch-size"),
    FlagMapping("training.rampup_batch_size", "--rampup-batch-size"),
    FlagMapping("training.train_iters", "--train-iters"),
    FlagMapping("training.lr", "--lr"),
    FlagMapping("training.min_lr", "--min-lr"),
    FlagMapping("training.lr_decay_style", "--lr-decay-style"),
    FlagMapping("training.lr_decay_iters", "--lr-decay-iters"),
    FlagMapping("training.lr_warmup_iters", "--lr-warmup-iters"),
    FlagMapping("training.lr_warmup_fraction", "--lr-warmup-fraction"),
    FlagMapping("training.lr_wsd_decay_iters", "--lr-wsd-decay-iters"),
    FlagMapping("training.lr_wsd_decay_style", "--lr-wsd-decay-style"),
    FlagMapping("training.weight_decay", "--weight-decay"),
    FlagMapping("training.start_weight_decay", "--start-weight-decay"),
    FlagMapping("training.end_weight_decay", "--end-weight-decay"),
    FlagMapping("training.weight_decay_incr_style", "--weight-decay-incr-style"),
    FlagMapping("training.clip_grad", "--clip-grad"),
    FlagMapping("training.adam_beta1", "--adam-beta1"),
    FlagMapping("training.adam_beta2", "--adam-beta2"),
    FlagMapping("training.adam_eps", "--adam-eps"),
    FlagMapping("training.seed", "--seed"),
    FlagMapping("training.use_distributed_optimizer", "--use-distributed-optimizer"),
    FlagMapping("training.overlap_grad_reduce", "--overlap-grad-reduce"),
    FlagMapping("training.overlap_param_gather", "--overlap-param-gather"),
    FlagMapping("training.recompute.granularity", "--recompute-granularity"),
    FlagMapping("training.recompute.method", "--recompute-method"),
    FlagMapping("training.recompute.num_layers", "--recompute-num-layers"),
    FlagMapping("training.calculate_per_token_loss", "--calculate-per-token-loss"),
    FlagMapping("training.log_interval", "--log-interval"),
    FlagMapping("training.eval_interval", "--eval-interval"),
    FlagMapping("training.eval_iters", "--eval-iters"),
    FlagMapping("training.exit_interval", "--exit-interval"),
    FlagMapping("training.exit_duration_minutes", "--exit-duration-in-mins"),
    FlagMapping("training.tensorboard_dir", "--tensorboard-dir"),
    FlagMapping("training.manual_gc", "--manual-gc"),
    FlagMapping("training.manual_gc_interval", "--manual-gc-interval"),
    FlagMapping("training.deterministic", "--deterministic-mode"),
    FlagMapping("training.distributed_timeout_minutes", "--distributed-timeout-minutes"),
    FlagMapping("data.path", "--data-path"),
    FlagMapping("data.mock", "--mock-data"),
    FlagMapping("data.split", "--split"),
    FlagMapping("data.cache_path", "--data-cache-path"),
    FlagMapping("data.tokenizer", "--tokenizer-file"),
    FlagMapping("data.vocab_file", "--vocab-file"),
    FlagMapping("data.merge_file", "--merge-file"),
    FlagMapping("data.tokenizer_type", "--tokenizer-type"),
    FlagMapping("data.eod_mask_loss", "--eod-mask-loss"),
    FlagMapping("data.reset_position_ids", "--reset-position-ids"),
    FlagMapping("data.reset_attention_mask", "--reset-attention-mask"),
    FlagMapping("data.sft", "--sft"),
    FlagMapping("data.num_workers", "--num-workers"),
    FlagMapping("checkpoint.save", "--save"),
    FlagMapping("checkpoint.load", "--load"),
    FlagMapping("checkpoint.save_interval", "--save-interval"),
    FlagMapping("checkpoint.async_save", "--async-save"),
    FlagMapping("checkpoint.memory_save_interval", "--non-persistent-save-interval"),
    FlagMapping("checkpoint.keep", "--keep-last"),
    FlagMapping("checkpoint.finetune", "--finetune"),
    FlagMapping("checkpoint.exit_on_missing", "--exit-on-missing-checkpoint"),
    FlagMapping("dpp.enabled", "--use-dpp"),
    FlagMapping("dpp.schedule", "--dpp-schedule"),
    FlagMapping("dpp.placement", "--dpp-placement"),
    FlagMapping("dpp.memory_cap", "--dpp-memory-cap"),
    FlagMapping("dpp.chunks", "--num-virtual-stages-per-pipeline-rank"),
    FlagMapping("dpp.transport", "--transport"),
    FlagMapping("dpp.workload", "--workload"),
    FlagMapping("fbd.enabled", "--forward-backward-disaggregating"),
    FlagMapping("fbd.backward_per_forward", "--fbd-backward-per-forward", default=1),
    FlagMapping("fbd.ignore_forward_tensor_parallel", "--ignore-forward-tensor-parallel"),
    FlagMapping("fbd.ship", "--fbd-ship"),
    FlagMapping("trace.enabled", "--trace"),
    FlagMapping("trace.capacity", "--trace-capacity"),
    FlagMapping("trace.interval", "--trace-interval"),
    FlagMapping("trace.continuous_iterations", "--continuous-trace-iterations"),
    FlagMapping("trace.granularity", "--trace-granularity"),
    FlagMapping("trace.directory", "--trace-dir"),
    FlagMapping("scope.training.enabled", "--training-control"),
    FlagMapping("scope.training.start_paused", "--training-start-paused"),
    FlagMapping("scope.training.resume_after_seconds", "--training-resume-after"),
    FlagMapping("scope.training.capture_every", "--scope-capture-interval"),
)
"""Two fields with the same flag have the same value where both are given (a rule refuses others)."""

SERVE_FLAGS: tuple[FlagMapping, ...] = (
    FlagMapping("serve.host", "--host"),
    FlagMapping("serve.port", "--port"),
    FlagMapping("serve.max_batch", "--max-batch-size"),
    FlagMapping("serve.max_tokens", "--max-tokens"),
    FlagMapping("serve.max_length", "--max-length"),
    FlagMapping("serve.queue_length", "--queue-length"),
    FlagMapping("serve.prefill_chunk", "--prefill-chunk"),
    FlagMapping("serve.precision", "--precision"),
    FlagMapping("scope.plugins", "--scope-plugins"),
)
"""Flags of `megatronapp_trainer.serve` in addition to FLAGS."""

OTHER_FLAGS = {
    "--group-query-attention": "model.num_query_groups",
    "--bf16": "training.precision",
    "--fp16": "training.precision",
    "--replication": "checkpoint.memory_save_interval",
    "--faults": "faults",
    "--scope-perturbations": "scope.perturbations",
    "--scope-probe-texts": "scope.training.probe_texts",
    "--no-scope-capture-not-finite": "scope.training.capture_not_finite",
    "--fbd-forward-ranks-apart": "fbd.forward",
    "--fbd-forward-on-cpu": "fbd.forward.gpus_per_node",
}
"""Flags that follow from a field without holding its value."""


OTHER_SPELLINGS = {"--tokenizer-model": "--tokenizer-file"}
"""Flags of `spec.args` that the trainer reads as others, under whose names it reports problems."""
REPLACED = {"training.train_iters": "--train-samples"}
"""Required fields, and the flag of `spec.args` that excludes the field's flag and replaces it."""


def gives(job: MegatronJob, flag: str) -> bool:
    """Return true if `spec.args` contains this flag."""
    return any(argument.partition("=")[0] == flag for argument in job.spec.args)


def obeys_orders(job: MegatronJob) -> bool:
    """Return true if the job's training can be paused and stepped."""
    return "--training-control" in megatron_arguments(job) or gives(job, "--training-ws-port")


def field_of(flag: str) -> str | None:
    """Return the field of a training's manifest for a flag, as in spec.model.numLayers; None if it has no field."""
    field = next((entry.field for entry in FLAGS if entry.flag == flag), OTHER_FLAGS.get(flag))
    return None if field is None else _path_in_yaml(field)


def _path_in_yaml(field: str) -> str:
    return ".".join(["spec", *map(to_camel, field.split("."))])


def place_of(job: MegatronJob, flag: str, value: str | None = None) -> str | None:
    """Return the place of this flag in a manifest: spec.args, which win, otherwise the flag's field, even if absent.

    `value` selects an item where the field is a list. None for a flag without a field.
    """
    names = [argument.partition("=")[0] for argument in job.spec.args]
    given = [index for index, name in enumerate(names) if OTHER_SPELLINGS.get(name, name) == flag]
    if given:
        return f"spec.args[{given[-1]}]"
    table = FLAGS if job.spec.mode == "train" else (*FLAGS, *SERVE_FLAGS)
    fields = [entry.field for entry in table if entry.flag == flag]
    written = [field for field in fields if _value(job.spec, field) is not None]
    field = next(iter([*written, *fields]), OTHER_FLAGS.get(flag))
    if field is None:
        return None
    place = _path_in_yaml(field)
    items = None if value is None else _value(job.spec, field)
    return f"{place}[{items.index(value)}]" if isinstance(items, tuple) and value in items else place


def megatron_arguments(job: MegatronJob) -> list[str]:
    """Return the trainer's command line for a job; ``spec.args`` are last, so they win."""
    table = FLAGS if job.spec.mode == "train" else (*FLAGS, *SERVE_FLAGS)
    replaced = {field for field, flag in REPLACED.items() if gives(job, flag)}
    table = tuple(entry for entry in table if entry.field not in replaced)
    values: dict[str, Value] = {}
    for entry in table:
        if values.get(entry.flag) is None:
            value = _value(job.spec, entry.field)
            values[entry.flag] = None if value == entry.default else value
    flags = [argument for flag, value in values.items() for argument in _flag_values(flag, value)]
    if _value(job.spec, "model.num_query_groups") is not None:
        flags.append("--group-query-attention")
    if (precision := _value(job.spec, "training.precision")) in {"bf16", "fp16"}:
        flags.append(f"--{precision}")
    if _value(job.spec, "checkpoint.memory_save_interval") is not None and derive_world(job.spec).nodes > 1:
        flags.append("--replication")
    if job.spec.fbd.enabled and job.spec.fbd.forward is not None:
        flags.append("--fbd-forward-ranks-apart")
        if job.spec.gpus_per_node and not job.spec.fbd.forward.gpus_per_node:
            flags.append("--fbd-forward-on-cpu")
    if job.spec.faults:
        flags += ["--faults", json.dumps([fault.to_dict() for fault in job.spec.faults], separators=(",", ":"))]
    if job.spec.mode == "serve" and job.spec.scope is not None and job.spec.scope.perturbations:
        recipes = [named.model_dump(mode="json", exclude_defaults=True) for named in job.spec.scope.perturbations]
        flags += ["--scope-perturbations", json.dumps(recipes, separators=(",", ":"))]
    return [*flags, *_capture_flags(job.spec), *job.spec.args]


def _capture_flags(spec: Spec) -> Iterator[str]:
    training = None if spec.scope is None else spec.scope.training
    if training is not None and not training.capture_not_finite:
        yield "--no-scope-capture-not-finite"
    if training is not None and training.probe_texts:
        yield "--scope-probe-texts"
        yield json.dumps(training.probe_texts, separators=(",", ":"))


def _value(spec: Spec, path: str) -> Value:
    """Return the field at a path; None where a block above it is absent."""
    value: object = spec
    for name in path.split("."):
        value = getattr(value, name, None)
    assert value is None or isinstance(value, bool | int | float | str | tuple)
    return value


def _flag_values(flag: str, value: Value) -> Iterator[str]:
    if value is None or value is False or value == ():
        return
    yield flag
    if isinstance(value, tuple):
        yield from map(str, value)
    elif value is not True:
        yield str(value)
