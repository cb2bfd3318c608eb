"""Rules between fields. Each yields the problems that it finds: where, what is wrong, what to write."""

import itertools
from collections.abc import Callable, Iterator

from megatronapp_common.errors import JobError
from megatronapp_common.job.partial import UnknownFieldError
from megatronapp_common.job.spec import Spec
from megatronapp_common.job.world import World, derive_world
from megatronapp_common.names import Env

Problems = Iterator[str]
RESERVED_ENV = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "NODE_IPS", "MASTER_ADDR"}
    | {"MASTER_PORT"}
    | set(Env)
)


def find_problems(spec: Spec) -> list[str]:
    """Everything that is wrong between the fields of a spec, as far as they are known (`partial_spec`)."""
    found = list(itertools.chain.from_iterable(_judged(rule(spec)) for rule in _RULES))
    try:
        world = derive_world(spec)
    except JobError as error:
        return [*found, *error.problems]
    except UnknownFieldError:
        return found
    found.extend(itertools.chain.from_iterable(_judged(rule(spec, world)) for rule in _WORLD_RULES))
    return found


def _judged(problems: Problems) -> Problems:
    """What a rule finds before it comes to a field that is not known."""
    try:
        yield from problems
    except UnknownFieldError:
        return


def _unsupported(spec: Spec) -> Problems:
    if spec.model.type == "bert":
        yield "spec.model.type: bert is not supported yet; write gpt"
    for name, size in (("context", spec.parallelism.context), ("expert", spec.parallelism.expert)):
        if size > 1:
            yield f"spec.parallelism.{name}: {size} is not supported yet; write 1 or leave it out"


def _head_width(spec: Spec) -> Problems:
    model = spec.model
    heads = model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"spec.model.hiddenSize: {model.hidden_size} is not a multiple of numAttentionHeads {heads}; "
            f"write {_nearest_multiple(model.hidden_size, heads)}, or give kvChannels"
        )


def _heads(spec: Spec) -> Problems:
    model, tensor = spec.model, spec.parallelism.tensor
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % tensor:
        yield (
            f"spec.model.numAttentionHeads: {heads} is not a multiple of parallelism.tensor {tensor}; "
            f"write {_nearest_multiple(heads, tensor)}"
        )
    if groups is None:
        return
    if heads % groups:
        yield f"spec.model.numQueryGroups: {groups} does not divide numAttentionHeads {heads}; write a divisor of it"
    if groups % tensor:
        yield (
            f"spec.model.numQueryGroups: {groups} is not a multiple of parallelism.tensor {tensor}; "
            f"write {_nearest_multiple(groups, tensor)}"
        )


def _widths(spec: Spec) -> Problems:
    model, tensor = spec.model, spec.parallelism.tensor
    if model.ffn_hidden_size is not None and model.ffn_hidden_size % tensor:
        yield (
            f"spec.model.ffnHiddenSize: {model.ffn_hidden_size} is not a multiple of parallelism.tensor {tensor}; "
            f"write {_nearest_multiple(model.ffn_hidden_size, tensor)}"
        )
    padding = model.make_vocab_size_divisible_by or 128
    if padding % tensor:
        yield (
            f"spec.model.makeVocabSizeDivisibleBy: {padding} is not a multiple of parallelism.tensor {tensor}; "
            f"write {_nearest_multiple(padding, tensor)}"
        )
    positions = model.max_position_embeddings
    if positions is not None and positions < model.seq_length:
        yield (
            f"spec.model.maxPositionEmbeddings: {positions} is below seqLength {model.seq_length}; "
            f"write {model.seq_length} or more"
        )


def _pipeline(spec: Spec) -> Problems:
    layout = spec.parallelism
    chunks = layout.virtual_pipeline or 1
    if layout.virtual_pipeline == 1:
        yield "spec.parallelism.virtualPipeline: 1 is the plain schedule; leave it out, or write 2 or more"
    elif chunks > 1 and layout.pipeline == 1:
        yield f"spec.parallelism.virtualPipeline: {chunks} needs pipeline above 1; leave it out"
    layers = spec.model.num_layers
    if layers % (layout.pipeline * chunks):
        parts = f"{layout.pipeline} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        yield (
            f"spec.model.numLayers: {layers} cannot be divided into {parts}; "
            f"write {_nearest_multiple(layers, layout.pipeline * chunks)}"
        )


def _sequence_parallel(spec: Spec) -> Problems:
    if not spec.parallelism.sequence_parallel:
        return
    tensor = spec.parallelism.tensor
    if tensor == 1:
        yield "spec.parallelism.sequenceParallel: needs tensor above 1; leave it out"
    length = spec.model.seq_length
    if length % tensor:
        yield (
            f"spec.model.seqLength: {length} is not a multiple of parallelism.tensor {tensor}, which "
            f"sequenceParallel needs; write {_nearest_multiple(length, tensor)}"
        )


def _overlap(spec: Spec) -> Problems:
    training = spec.training
    if training.overlap_param_gather and not training.use_distributed_optimizer:
        yield "spec.training.overlapParamGather: needs useDistributedOptimizer: true"
    if training.overlap_param_gather and not training.overlap_grad_reduce:
        yield "spec.training.overlapParamGather: needs overlapGradReduce: true"


def _recompute(spec: Spec) -> Problems:
    recompute = spec.training.recompute
    if recompute is None:
        return
    given = (recompute.method is not None, recompute.num_layers is not None)
    if recompute.granularity == "full" and not all(given):
        yield "spec.training.recompute: granularity full needs method (uniform or block) and numLayers; write both"
    if recompute.granularity == "selective" and any(given):
        yield "spec.training.recompute: method and numLayers belong to granularity full; leave them out"


def _schedules(spec: Spec) -> Problems:
    training = spec.training
    if training.min_lr is not None and training.min_lr > training.lr:
        yield f"spec.training.minLr: {training.min_lr:g} is above lr {training.lr:g}; write {training.lr:g} or less"
    if training.lr_warmup_iters and training.lr_warmup_fraction is not None:
        yield "spec.training.lrWarmupFraction: lrWarmupIters is given too; leave one of them out"
    steps = training.lr_decay_iters or training.train_iters
    if (training.lr_warmup_iters or 0) >= steps:
        yield (
            f"spec.training.lrWarmupIters: {training.lr_warmup_iters} must be below the {steps} steps of the decay; "
            f"write {max(steps // 10, 0)}"
        )
    if training.lr_decay_style == "WSD" and training.lr_wsd_decay_iters is None:
        yield "spec.training.lrWsdDecayIters: is missing; lrDecayStyle WSD needs the steps of its last phase"


def _weight_decay(spec: Spec) -> Problems:
    training = spec.training
    growing = training.weight_decay_incr_style not in {None, "constant"}
    given = (training.start_weight_decay is not None, training.end_weight_decay is not None)
    if growing and not all(given):
        yield (
            f"spec.training.weightDecayIncrStyle: {training.weight_decay_incr_style} needs startWeightDecay and "
            f"endWeightDecay; write both"
        )
    if not growing and any(given):
        yield (
            "spec.training.startWeightDecay, endWeightDecay: belong to weightDecayIncrStyle linear or cosine; "
            "write it, or leave them out"
        )


def _data(spec: Spec) -> Problems:
    data = spec.data
    if not data.path and not data.mock:
        yield "spec.data.path: is missing; write path: [PREFIX] (made by `megatronapp data prepare`), or mock: true"
    if data.path and data.mock:
        yield "spec.data.mock: path is given too; leave one of them out"
    if data.mock and spec.model.vocab_size is None:
        yield "spec.model.vocabSize: is missing; data.mock needs it, for example vocabSize: 1024"
    for name, on in (("resetPositionIds", data.reset_position_ids), ("resetAttentionMask", data.reset_attention_mask)):
        if data.mock and on:
            yield f"spec.data.{name}: data.mock holds no documents; leave it out"
    if (data.vocab_file is None) != (data.merge_file is None):
        yield "spec.data.vocabFile, mergeFile: belong together; write both, or tokenizer instead"
    if data.tokenizer is not None and data.vocab_file is not None:
        yield "spec.data.tokenizer: vocabFile is given too; leave one of them out"
    if data.reset_position_ids and spec.model.position_embedding_type == "rope":
        yield "spec.data.resetPositionIds: has no effect on rotary positions, which are relative; leave it out"
    yield from _blend(data.path)


def _blend(path: tuple[str, ...]) -> Problems:
    weights = [_is_number(item) for item in path]
    if len(path) > 1 and any(weights):
        if len(path) % 2 or weights != [True, False] * (len(path) // 2):
            yield 'spec.data.path: a blend takes a weight before every prefix, as in ["0.3", "a", "0.7", "b"]'
    elif len(path) == 1 and weights[0]:
        yield f"spec.data.path: {path[0]} is a weight without a prefix; write the prefix of the .bin/.idx files"


def _checkpoint(spec: Spec) -> Problems:
    checkpoint = spec.checkpoint
    for name, value in (("saveInterval", checkpoint.save_interval), ("keep", checkpoint.keep)):
        if value is not None and checkpoint.save is None:
            yield f"spec.checkpoint.{name}: needs save: DIRECTORY"
    for name, on in (("finetune", checkpoint.finetune), ("exitOnMissing", checkpoint.exit_on_missing)):
        if on and checkpoint.load is None:
            yield f"spec.checkpoint.{name}: needs load: DIRECTORY"


def _workers(spec: Spec) -> Problems:
    if spec.gpus_per_node and spec.proc_per_node and spec.proc_per_node > spec.gpus_per_node:
        yield (
            f"spec.procPerNode: {spec.proc_per_node} ranks but gpusPerNode {spec.gpus_per_node}; a rank needs a GPU of "
            f"its own: write {spec.gpus_per_node} or less, or gpusPerNode: 0 to train on the CPU"
        )


def _environment(spec: Spec) -> Problems:
    seen: set[str] = set()
    for index, variable in enumerate(spec.env):
        if variable.name in RESERVED_ENV:
            yield f"spec.env[{index}].name: {variable.name} is set by the launcher; leave it out"
        if variable.name in seen:
            yield f"spec.env[{index}].name: {variable.name} is given twice; leave one of them out"
        seen.add(variable.name)


def _run_policy(spec: Spec) -> Problems:
    backoff = spec.run_policy.backoff
    if backoff.max_seconds < backoff.initial_seconds:
        yield (
            f"spec.runPolicy.backoff.maxSeconds: {backoff.max_seconds:g} is below initialSeconds "
            f"{backoff.initial_seconds:g}; write {backoff.initial_seconds:g} or more"
        )


def _global_batch(spec: Spec, world: World) -> Problems:
    training, layout = spec.training, spec.parallelism
    stride = training.micro_batch_size * world.data_parallel_size
    batch = training.global_batch_size or stride
    if batch % stride:
        yield (
            f"spec.training.globalBatchSize: {batch} is not a multiple of microBatchSize {training.micro_batch_size} x "
            f"{world.data_parallel_size} replicas; write {_nearest_multiple(batch, stride)}"
        )
    elif (layout.virtual_pipeline or 1) > 1 and batch // stride % layout.pipeline:
        yield (
            f"spec.training.globalBatchSize: {batch} gives {batch // stride} microbatches, and the interleaved "
            f"schedule needs a multiple of pipeline {layout.pipeline}; "
            f"write {_nearest_multiple(batch, stride * layout.pipeline)}"
        )


def _ramp_up(spec: Spec, world: World) -> Problems:
    training = spec.training
    if training.rampup_batch_size is None:
        return
    if training.global_batch_size is None:
        yield "spec.training.globalBatchSize: is missing; rampupBatchSize needs it as its goal"
        return
    start, increment, _ = training.rampup_batch_size
    stride = training.micro_batch_size * world.data_parallel_size
    if start % stride or increment % stride:
        yield (
            f"spec.training.rampupBatchSize: start {start} and increment {increment} must be multiples of {stride} "
            f"(microBatchSize x data); write [{_nearest_multiple(start, stride)}, "
            f"{_nearest_multiple(increment, stride)}, ...]"
        )
    goal = training.global_batch_size
    if start > goal or (goal - start) % increment:
        yield f"spec.training.rampupBatchSize: {start} does not reach globalBatchSize {goal} in steps of {increment}"


def _gpus(spec: Spec, world: World) -> Problems:
    if spec.gpus_per_node and spec.proc_per_node is None and world.proc_per_node[0] > spec.gpus_per_node:
        yield (
            f"spec.nodes: {world.nodes} nodes of {spec.gpus_per_node} GPUs cannot hold {world.world_size} ranks; "
            f"write nodes: {-(-world.world_size // spec.gpus_per_node)}"
        )


def _faults(spec: Spec, world: World) -> Problems:
    if spec.faults and not spec.trace.enabled:
        yield "spec.faults: need trace.enabled: true"
    last = world.world_size - 1
    for index, fault in enumerate(spec.faults):
        where = f"spec.faults[{index}]"
        for name, rank in (("rank", fault.rank), ("peer", fault.peer)):
            if rank is not None and rank > last:
                yield f"{where}.{name}: {rank} is outside of this job's {world.world_size} ranks; write 0 to {last}"
        if fault.peer is not None and fault.kind != "link":
            yield f"{where}.peer: belongs to kind link; leave it out"
        if fault.peer == fault.rank:
            yield f"{where}.peer: {fault.peer} is the rank itself; write the rank it receives from"
        if fault.from_step >= spec.training.train_iters:
            yield (
                f"{where}.fromStep: {fault.from_step} is never reached by trainIters {spec.training.train_iters}; "
                f"write less"
            )


def _nearest_multiple(value: int, factor: int) -> int:
    """The multiple of ``factor`` that is nearest to ``value``, at least ``factor``."""
    return max(factor, (value + factor // 2) // factor * factor)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_RULES: tuple[Callable[[Spec], Problems], ...] = (
    _unsupported,
    _head_width,
    _heads,
    _widths,
    _pipeline,
    _sequence_parallel,
    _overlap,
    _recompute,
    _schedules,
    _weight_decay,
    _data,
    _checkpoint,
    _workers,
    _environment,
    _run_policy,
)
_WORLD_RULES: tuple[Callable[[Spec, World], Problems], ...] = (_global_batch, _ramp_up, _gpus, _faults)
