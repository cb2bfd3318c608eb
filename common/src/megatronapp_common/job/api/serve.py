"""Types of the block `serve`: serving of a trained model."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.job.api.model import Count
from megatronapp_common.names import SERVE_PORT


class Serve(ManifestModel):
    """Address and limits of a served model."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address of the API without a cluster; anything but loopback admits other machines (with a token)."""
    port: Annotated[int, Field(ge=0, le=65535)] = SERVE_PORT
    """Port of the API without a cluster; 0: a free one. On a cluster it is always 8000."""
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of prompts that are generated together."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 1024
    """Largest number of new tokens of a prompt."""
    max_length: Count | None = None
    """Largest number of tokens of a prompt and its answer, for which memory is allocated maxBatch times; defaults to
    the positions that the model was trained with."""
    queue_length: Annotated[int, Field(ge=0, le=4096)] = 32
    """Number of prompts that may wait; requests beyond are answered with 429. A request may have maxBatch + queueLength
    texts."""
    prefill_chunk: Annotated[int, Field(ge=1, le=1_048_576)] = 512
    """Tokens of a prompt that are read in one forward pass; less needs less memory."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of weights and activations; defaults to the one of the training."""
