"""Rules for CUDA graphs of training passes: what a graph cannot replay."""

import importlib.util
from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig


def graph_obstacles(config: TrainerConfig) -> tuple[str, ...]:
    """Return what keeps the passes of a microbatch out of a CUDA graph, named by flags; empty if nothing does.

    A graph holds a pass of one microbatch with fixed shapes, draws no random numbers, and sends nothing to other stages
    or replicas. The parts that packed documents are computed in differ from one microbatch to the next.
    Transformer Engine's layers, which are the default where it is installed, choose their kernels in each pass.
    """
    model, parallel, precision = config.model, config.parallel, config.precision
    found = {
        "--context-parallel-size above 1": parallel.context_parallel_size > 1,
        "--reset-attention-mask": config.data.reset_attention_mask,
        "--sft": config.data.sft,
        "--forward-backward-disaggregating": config.fbd.enabled,
        f"--model-type {model.model_type}": model.model_type != "gpt",
        "--num-experts": model.num_experts is not None,
        "dropout": model.has_dropout,
        "--recompute-granularity": precision.granularity is not None,
        f"--transformer-impl {model.transformer_impl}": model.transformer_impl not in {"", "torch"},
        "Transformer Engine, which is installed, without --transformer-impl torch": not model.transformer_impl
        and precision.fp8_format is None  # whose layers are ours
        and importlib.util.find_spec("transformer_engine") is not None,
    }
    return tuple(name for name, holds in found.items() if holds)


def reasons_against_graphs(config: TrainerConfig) -> tuple[str, ...]:
    """Return why the passes of a microbatch are not replayed; empty if they are.

    Besides what a graph cannot hold, unless graphs are asked for: what costs more than it saves, and tensor-parallel
    collectives whose transfers NCCL shall report, which it does not do in replays.
    """
    requested, parallel = config.kernels.cuda_graph_impl, config.parallel
    if requested == "none":
        return ("--cuda-graph-impl none",)
    obstacles = graph_obstacles(config)
    if requested == "local":
        return obstacles
    found = {
        "--trace-nccl with --tensor-model-parallel-size above 1 (--cuda-graph-impl local replays, without NCCL's "
        "times of these collectives)": config.logging.trace_nccl and parallel.tensor_model_parallel_size > 1,
        "--overlap-grad-reduce": parallel.overlap_grad_reduce and uses_slots(config),
        "--overlap-param-gather": parallel.overlap_param_gather and uses_slots(config),
    }
    return obstacles + tuple(name for name, holds in found.items() if holds)


def overlaps_by_default(config: TrainerConfig, *, data_size: int) -> bool:
    """Return whether a run on GPUs overlaps transfers of its replicas with passes although no flag asks for it.

    It does where passes are replayed as whole microbatches: graphs are cut where a transfer begins. Graphs in slots are
    not, so that passes with transfers would run without one, which costs more than the transfers.
    """
    parallel = config.parallel
    return (
        parallel.overlap_data_parallel
        and not parallel.overlap_grad_reduce
        and data_size > 1
        and not uses_slots(config)
        and not reasons_against_graphs(config)
        and parallel.distributed_backend != "gloo"
    )


def uses_slots(config: TrainerConfig) -> bool:
    """Return whether graphs, where there are any, are replayed in slots.

    That is so where several microbatches are in flight, collectives are in graphs, or the scale of the loss changes.
    """
    parallel = config.parallel
    return (
        parallel.pipeline_model_parallel_size > 1
        or parallel.tensor_model_parallel_size > 1
        or config.dpp.use_dpp
        or config.precision.fp16
    )


def graph_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence if graphs are asked for where they cannot be."""
    obstacles = graph_obstacles(config) if config.kernels.cuda_graph_impl == "local" else ()
    yield from require(
        not obstacles,
        f"--cuda-graph-impl local cannot be combined with {', '.join(obstacles)}; leave one of them out",
    )
