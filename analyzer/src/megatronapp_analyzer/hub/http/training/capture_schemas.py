"""Models of captured steps of a training."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.web.models import ApiModel

Quantity = Literal["rms", "mean", "largest", "notFinite", "zeros", "ratio"]
NO_LAYER = "-1: no layer, or the weights outside of the layers."


class SiteOfLayer(ApiModel):
    """A site of a layer."""

    site: str
    layer: Annotated[int, Field(description=NO_LAYER)]


class CapturedStepView(ApiModel):
    """A captured step without its numbers."""

    step: Annotated[int, Field(description="Steps done with it.")]
    attempt: int
    missing: Annotated[list[int], Field(description="Ranks of which there is nothing, the first 64.")]
    first_not_finite: Annotated[
        SiteOfLayer | None, Field(description="First site with NaN or Inf in the order of computation.")
    ]
    perturbation: Annotated[
        str | None, Field(description="Digest of the recipe that was in force in the step; null: none was.")
    ]
    repeated: Annotated[
        bool,
        Field(description="Captured in a second computation, as its loss or gradient norm was not finite."),
    ]


class Captures(ApiModel):
    """One quantity of one site, over layers and steps."""

    every: Annotated[int | None, Field(description="Steps from one capture to the next; null: no rank captures.")]
    sites: Annotated[list[str], Field(description="Sites that were captured, in the order of computation.")]
    site: str
    quantity: Quantity
    steps: list[CapturedStepView]
    layers: Annotated[list[int], Field(description=NO_LAYER)]
    values: Annotated[
        list[list[float | None]], Field(description="[layer][step]; null: nothing was captured, or no value is finite.")
    ]
    not_finite: Annotated[list[list[int]], Field(description="Number of NaN and Inf, [layer][step].")]


class SiteStatistics(ApiModel):
    """Statistics of a site of a layer in one step. NaN and Inf are counted, and are in no other field but count."""

    site: str
    layer: Annotated[int, Field(description=NO_LAYER)]
    count: int
    nan: int
    inf: int
    zero: int
    mean: Annotated[float | None, Field(description="Of the finite values; null without any.")]
    rms: Annotated[float | None, Field(description="Root of the mean square of the finite values.")]
    largest: Annotated[float, Field(description="Largest finite magnitude.")]
    histogram: Annotated[list[int], Field(description="Finite values other than 0, by magnitude.")]


class CapturesSummary(ApiModel):
    """Interval of captures, and the newest of them."""

    every: Annotated[int | None, Field(description="Steps from one capture to the next; null: no rank captures.")]
    newest: Annotated[int | None, Field(description="Newest captured step; null before the first one.")]
    newest_probe: Annotated[int | None, Field(description="Newest step after which probe texts were run.")]


class CapturedStepDetails(ApiModel):
    """All numbers of a captured step."""

    step: CapturedStepView
    first_exponent: Annotated[
        int, Field(description="Bin b counts magnitudes from 2^(first + b) to 2^(first + b + 1); the outer ones more.")
    ]
    statistics: list[SiteStatistics]
