"""Rules for ranks that share a sequence, and what they cannot be combined with yet."""

from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.parallel import CONTEXT_EXCHANGES, ParallelConfig
from megatronapp_trainer.config.root import TrainerConfig

_SIZE, _EXCHANGE = "--context-parallel-size", "--cp-comm-type"
_INSTEAD = {
    "all_gather": "p2p, which needs less memory",
    "a2a+p2p": "a2a within a node, or p2p, whose transfers overlap compute",
}
"""Values of Megatron's that are refused, and what to write."""


def context_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    if config.parallel.context_parallel_size == 1:
        given = config.parallel.cp_comm_type
        yield from require(
            given == ParallelConfig().cp_comm_type, f"{_EXCHANGE} needs {_SIZE} above 1; add it, or leave it out"
        )
        return
    for rule in (_exchange, _sequence, _unsupported):
        yield from rule(config)


def _exchange(config: TrainerConfig) -> Iterator[str]:
    given = config.parallel.cp_comm_type
    if not (
        yield from require(
            len(given) == 1,
            f"{_EXCHANGE} {' '.join(given)}: all layers exchange alike; give a single value, {_either()}",
        )
    ):
        return
    (value,) = given
    if value not in CONTEXT_EXCHANGES:
        yield f"{_EXCHANGE} {value} is not supported; write {_INSTEAD.get(value, _either())}"
        return
    yield from _heads(config) if value == "a2a" else _ring(config)


def _either() -> str:
    return " or ".join(CONTEXT_EXCHANGES)


def _heads(config: TrainerConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    tensor, size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    parts, product = tensor * size, f"--tensor-model-parallel-size {tensor} x {_SIZE} {size}"
    heads, groups = model.num_attention_heads, model.heads_of_keys
    yield from require(
        heads % parts == 0,
        f"{_EXCHANGE} a2a divides heads, and --num-attention-heads {heads} is not a multiple of {product}; write p2p",
    )
    yield from require(
        groups % parts == 0,
        f"{_EXCHANGE} a2a divides heads, and the {groups} heads of keys (--num-query-groups) are not a multiple of "
        f"{product}; write p2p",
    )


def _ring(config: TrainerConfig) -> Iterator[str]:
    model = config.model
    yield from require(
        model.attention_dropout == 0,
        f"{_EXCHANGE} p2p, the default, has no dropout of attention; write --attention-dropout 0 or {_EXCHANGE} a2a",
    )
    yield from require(
        model.window_size is None, f"{_EXCHANGE} p2p has no --window-size; write {_EXCHANGE} a2a, or leave it out"
    )


def _sequence(config: TrainerConfig) -> Iterator[str]:
    length, parallel = config.model.seq_length, config.parallel
    size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    yield from require(
        length % (2 * size) == 0,
        f"{_SIZE} {size} divides a sequence into {2 * size} chunks, and --seq-length {length} is not a multiple of it",
    )
    yield from require(
        not parallel.sequence_parallel or length % (size * tensor) == 0,
        f"--sequence-parallel with {_SIZE} {size}: --seq-length {length} must be a multiple of "
        f"--tensor-model-parallel-size {tensor} x {size}",
    )


def _unsupported(config: TrainerConfig) -> Iterator[str]:
    model, control = config.model, config.control
    layers = model.transformer_impl
    yield from require(
        layers in {"", "torch"},
        f"{_SIZE} above 1 is not supported with --transformer-impl {layers}; write torch",
    )
    unsupported = {
        f"--model-type {model.type}": model.type != "gpt",
        "--num-experts": model.num_experts is not None,
        "--forward-backward-disaggregating": config.fbd.enabled,
        "--training-control": control.training_control,
        "--training-ws-port": control.training_ws_port is not None,
        "--scope-capture-interval": control.scope_capture_interval is not None,
    }
    for flag, on in unsupported.items():
        yield from require(not on, f"{_SIZE} above 1 cannot be combined with {flag} yet; leave one of them out")
