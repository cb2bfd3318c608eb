"""Types of the block `scope`: MegaScope of a served model."""

from typing import Annotated

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel

MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
Module = Annotated[str, Field(max_length=256, pattern=MODULE_PATTERN)]


class Scope(ManifestModel):
    """MegaScope of a served model."""

    plugins: Annotated[tuple[Module, ...], Field(max_length=16)] = ()
    """Python modules that each rank imports before it loads the model; they register sites."""
