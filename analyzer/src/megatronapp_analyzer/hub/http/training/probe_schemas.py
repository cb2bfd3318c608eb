"""Models of probe texts of a training."""

from typing import Annotated

from pydantic import Field

from megatronapp_common.web.models import ApiModel


class ProbeText(ApiModel):
    """A text that is run after captured steps."""

    text: str
    tokens: Annotated[list[str], Field(description="Its tokens as strings.")]
    block: Annotated[int, Field(description="Tokens of a row of its attention maps.")]


class ProbedStepView(ApiModel):
    """A step after which the texts were run."""

    step: Annotated[int, Field(description="Steps done.")]
    attempt: int
    mean_logprobs: Annotated[
        list[float | None],
        Field(description="By text: mean log-probability of its tokens but the first; null: not computed."),
    ]
    perturbation: Annotated[
        str | None,
        Field(description="Digest of the recipe that was in force in the step before the texts; null: none was."),
    ]


class Probes(ApiModel):
    """Texts, and the steps after which they were run."""

    texts: list[ProbeText]
    steps: Annotated[list[ProbedStepView], Field(description="Ascending.")]
    layers: Annotated[list[int], Field(description="Layers of attention maps.")]
    heads: Annotated[int, Field(description="Number of heads of each layer.")]


class ProbeCandidate(ApiModel):
    """A likely next token."""

    token: str
    logprob: float


class ProbeResult(ApiModel):
    """Numbers of a text after a step."""

    step: int
    text: int
    logprobs: Annotated[
        list[float | None], Field(description="By token: log-probability of the token that follows; null at the end.")
    ]
    candidates: Annotated[list[list[ProbeCandidate]], Field(description="By token: likeliest next tokens.")]
    layers: Annotated[list[int], Field(description="Layers of `norms`; -1: the embedding.")]
    norms: Annotated[
        list[list[float | None]], Field(description="[layer][token]: Euclidean norm of the residual after the layer.")
    ]


class ProbeAttention(ApiModel):
    """Attention of a head over a text after a step."""

    step: int
    text: int
    layer: int
    head: int
    block: Annotated[int, Field(description="Tokens of a row and of a column.")]
    probabilities: Annotated[
        list[list[float]],
        Field(description="[query][key], in 255 levels: mean over the queries of a block, sum over its keys."),
    ]
