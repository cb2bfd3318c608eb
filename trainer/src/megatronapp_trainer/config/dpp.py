"""Flags of MegaDPP, the pipeline schedule that decides during the step."""

import dataclasses

from megatronapp_trainer.config.fields import option

DPP_SCHEDULES = ("auto", "dfc", "bfc", "static", "zero-bubble")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DppConfig:
    """Dynamic pipeline schedule (MegaDPP)."""

    use_dpp: bool = option(False, "run the passes of a step as their inputs arrive, over a transport of our own")
    dpp_schedule: str = option(
        "auto",
        "auto: the static order, left while an input is late; dfc, bfc: any ready pass, depth or breadth first; "
        "static: the order of megatron-core; zero-bubble: that order with weight gradients apart",
        choices=DPP_SCHEDULES,
    )
    dpp_memory_cap: int | None = option(
        None,
        "microbatches whose activations a rank may keep; default: two chunks more than the static order",
        bounds="[1, inf)",
    )
