"""Types of the block `scope`: MegaScope of a served model, and control of a running training."""

from typing import Annotated

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.scope.perturbation.recipe import MAX_NAMED, NamedRecipe
from megatronapp_common.scope.probe_limits import MAX_CHARACTERS, MAX_TEXTS

MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
Module = Annotated[str, Field(max_length=256, pattern=MODULE_PATTERN)]


ProbeText = Annotated[str, Field(min_length=1, max_length=MAX_CHARACTERS)]


class TrainingControl(ManifestModel):
    """Control of a running training: pause, resume, step, stop; and captures of its layers."""

    enabled: bool = True
    """Obey orders at step boundaries."""
    start_paused: bool = False
    """Pause before the first step, after restarts, too."""
    resume_after_seconds: Annotated[int, Field(ge=60, le=31_536_000)] | None = None
    """Seconds without a controlling client after which a pause ends."""
    capture_every: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Steps between captures of layers; default: none."""
    capture_not_finite: bool = True
    """Compute a step again, captured, whose loss or gradient norm is not finite, where steps are captured."""
    probe_texts: Annotated[tuple[ProbeText, ...], Field(max_length=MAX_TEXTS)] = ()
    """Texts to run through the weights after each captured step; need a tokenizer."""


class Scope(ManifestModel):
    """MegaScope of a served model, and control of a running training."""

    plugins: Annotated[tuple[Module, ...], Field(max_length=16)] = ()
    """Python modules that each rank imports, which register sites; only in mode serve."""
    training: TrainingControl | None = None
    """Control and captures; only in mode train."""
    perturbations: Annotated[tuple[NamedRecipe, ...], Field(max_length=MAX_NAMED)] = ()
    """Recipes of perturbations (docs/perturbation.md) that requests choose by name; only in mode serve."""
