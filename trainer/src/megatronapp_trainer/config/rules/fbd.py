"""Rules for the flags of MegaFBD."""

from collections.abc import Iterator

from megatronapp_trainer.config.fbd import ShipMode
from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig

_SWITCH = "--forward-backward-disaggregating"


def fbd_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    fbd, dpp = config.fbd, config.dpp
    given = {
        "--ignore-forward-tensor-parallel": fbd.merged,
        "--fbd-backward-per-forward": fbd.fbd_backward_per_forward != 1,
        "--fbd-ship": fbd.fbd_ship is not None,
        "--fbd-forward-on-cpu": fbd.fbd_forward_on_cpu,
        "--fbd-forward-ranks-apart": fbd.fbd_forward_ranks_apart,
    }
    for flag, on in given.items():
        yield from require(fbd.enabled or not on, f"{flag} needs {_SWITCH}")
    if not fbd.enabled:
        return
    yield from require(
        not fbd.merged or fbd.fbd_backward_per_forward == 1,
        f"--fbd-backward-per-forward {fbd.fbd_backward_per_forward} and --ignore-forward-tensor-parallel exclude each "
        "other: a forward rank serves the ranks of a tensor group or those of several replicas; leave one of them out",
    )
    for flag, on in (
        ("--transport native", dpp.replaces_transfers),
        ("--overlap-param-gather", config.parallel.overlap_param_gather),
        ("--qk-layernorm", config.model.qk_layernorm),
    ):
        yield from require(not on, f"{flag} and {_SWITCH} cannot be combined yet; leave one of them out")
    modules = config.precision.recompute_modules
    yield from require(
        modules is None or set(modules) == {"core_attn"},
        f"--recompute-modules {' '.join(modules or ())} and {_SWITCH} cannot be combined yet; leave one of them out",
    )
    yield from _dpp_problems(config)
    yield from require(
        not (fbd.merged and config.model.attention_dropout > 0),
        f"--attention-dropout {config.model.attention_dropout:g} cannot be combined with "
        "--ignore-forward-tensor-parallel: torch draws one mask for all heads, and it cannot be divided over the ranks "
        "of a tensor group; write --attention-dropout 0",
    )
    recomputes = ShipMode.FULL in config.ship_modes
    cause = f"--fbd-ship {fbd.fbd_ship}" if fbd.fbd_ship is not None else "--recompute-granularity full"
    yield from require(
        not (fbd.merged and config.parallel.sequence_parallel and recomputes and config.model.hidden_dropout > 0),
        f"--hidden-dropout {config.model.hidden_dropout:g} cannot be combined with --ignore-forward-tensor-parallel, "
        f"--sequence-parallel and {cause}: what a backward rank computes again would have another mask; write "
        "--hidden-dropout 0 or --fbd-ship saved",
    )
    if fbd.fbd_forward_on_cpu:
        yield from _problems_with_forward_on_cpu(config)


def _problems_with_forward_on_cpu(config: TrainerConfig) -> Iterator[str]:
    """Yield what differs between forward passes of a CPU and of a GPU."""
    model, flag = config.model, "--fbd-forward-on-cpu"
    yield from require(
        config.ship_modes == (ShipMode.FULL,),
        f"{flag} needs --fbd-ship full, as CPUs and GPUs save different tensors of a layer; write --fbd-ship full",
    )
    yield from require(
        config.fbd.fbd_ship is not None or config.precision.recompute_method != "block",
        f"{flag} cannot be combined with --recompute-method block, which recomputes some layers only, as CPUs and GPUs "
        "save different tensors of the others; write --recompute-method uniform, or --fbd-ship full",
    )
    for name, dropout in (
        ("--attention-dropout", model.attention_dropout),
        ("--hidden-dropout", model.hidden_dropout),
    ):
        yield from require(
            dropout == 0,
            f"{name} {dropout:g} cannot be combined with {flag}: CPUs and GPUs draw different masks, and a backward "
            f"rank draws them again; write {name} 0",
        )
    yield from require(
        model.transformer_impl != "transformer_engine",
        f"--transformer-impl transformer_engine cannot be combined with {flag}, as it needs a GPU; write "
        "--transformer-impl torch or local",
    )


def _dpp_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each flag of MegaDPP that ranks of one role cannot follow."""
    dpp, tensor = config.dpp, config.parallel.tensor_model_parallel_size
    if not dpp.use_dpp:
        return
    yield from require(
        tensor == 1,
        f"--use-dpp and {_SWITCH} need --tensor-model-parallel-size 1, not {tensor}: the ranks of a tensor group would "
        "have to choose the same order in each role, which they cannot yet; leave --use-dpp out",
    )
    yield from require(
        dpp.dpp_schedule != "zero-bubble",
        f"--dpp-schedule zero-bubble cannot be combined with {_SWITCH}: its places for weight gradients are between "
        "forward passes, which other ranks run; take --dpp-schedule auto, which computes them in waits",
    )
    yield from require(
        dpp.dpp_placement != "vee",
        f"--dpp-placement vee cannot be combined with {_SWITCH}: the stages of both roles are in a loop; leave it out",
    )
    yield from require(
        dpp.dpp_memory_cap is None,
        f"--dpp-memory-cap means nothing with {_SWITCH}: the number of passes for which a backward rank has room is "
        "fixed at the start; leave it out",
    )
