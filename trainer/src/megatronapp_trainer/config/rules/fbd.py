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
        ("--use-dpp", dpp.use_dpp),
        ("--transport native", dpp.replaces_transfers),
        ("--overlap-param-gather", config.parallel.overlap_param_gather),
    ):
        yield from require(not on, f"{flag} and {_SWITCH} cannot be combined yet; leave one of them out")
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
