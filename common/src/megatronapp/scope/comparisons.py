"""Comparisons and sweeps as arrays; what the numbers mean is in docs/comparing-runs.md."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatronapp.scope.connection import HubConnection
from megatronapp.scope.errors import ScopeError
from megatronapp.scope.results import floats

ComparisonMode = Literal["teacher-forced", "free"]
SweepMetric = Literal["meanKl", "firstDivergence", "logprobChange"]
Recipe = Mapping[str, Any] | str
"""Recipe of docs/perturbation.md, or the name or digest of one of the manifest."""
POLL_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Two branches of a prompt, A and B. Arrays are over generated tokens; NaN where B's text differs already."""

    id: str
    state: str
    texts: tuple[str, str]
    """Text of A and of B."""
    tokens: tuple[list[int], list[int]]
    """Tokens that each branch chose."""
    kl: NDArray[np.float64]
    """KL(A || B) in nats."""
    overlap: NDArray[np.float64]
    """Number of A's likeliest tokens that are among B's."""
    rank: NDArray[np.float64]
    """Number of tokens that are likelier in B than A's token."""
    logprob_a: NDArray[np.float64]
    """Log-probability of A's token in A."""
    logprob_b: NDArray[np.float64]
    """Log-probability of A's token in B."""
    first_divergence: int | None
    drift: NDArray[np.float64]
    """Relative difference of the residual after each layer, [layers, tokens]."""
    heads: NDArray[np.float64] | None
    """Relative difference of each head's output, [layers, heads, tokens]; None unless requested."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """Matrix of comparisons with one reference."""

    id: str
    state: str
    metric: str
    layers: list[int]
    strengths: list[float] | None
    positions: list[int] | None
    values: NDArray[np.float64]
    """Metric, [layers, strengths or positions]; NaN: no divergence, or not computed."""
    digests: list[list[str]]
    """Recipe of each cell."""
    ids: list[int]
    """Tokens of the reference, which every cell reads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchSummary:
    """A comparison or a sweep in the list of all."""

    id: str
    state: str
    """`queued`, `running`, `done`, `cancelled` or `failed`."""
    prompt: str
    done: int
    """Tokens that are compared, or cells of the sweep that are known."""
    total: int
    """Largest number of tokens of a branch, or cells of the sweep."""


def comparison_summaries(answer: Sequence[Mapping[str, Any]]) -> list[BranchSummary]:
    """Build the list of comparisons from the hub's answer."""
    return [_summary(entry, "comparison", done="compared", total="tokens") for entry in answer]


def sweep_summaries(answer: Sequence[Mapping[str, Any]]) -> list[BranchSummary]:
    """Build the list of sweeps from the hub's answer."""
    return [_summary(entry, "sweep", done="done", total="cells") for entry in answer]


def _summary(entry: Mapping[str, Any], kind: str, *, done: str, total: str) -> BranchSummary:
    state, prompt = entry["state"], entry["prompt"]
    return BranchSummary(id=entry[kind], state=state, prompt=prompt, done=entry[done], total=entry[total])


def comparison_of(answer: Mapping[str, Any]) -> Comparison:
    """Build a Comparison from the hub's answer."""
    rows = answer["rows"]
    first, second = ([row[branch] for row in rows] for branch in ("a", "b"))
    shape = (len(answer["drift"]), len(rows))
    return Comparison(
        id=answer["comparison"],
        state=answer["state"],
        texts=(answer["texts"][0], answer["texts"][1]),
        tokens=(_ids(first), _ids(second)),
        kl=floats([row["kl"] for row in rows]),
        overlap=floats([row["overlap"] for row in rows]),
        rank=floats([row["rank"] for row in rows]),
        logprob_a=floats([None if token is None else token["logprob"] for token in first]),
        logprob_b=floats([None if token is None else token["otherLogprob"] for token in first]),
        first_divergence=answer["firstDivergence"],
        drift=floats(answer["drift"]).reshape(shape),
        heads=None if answer["heads"] is None else floats(answer["heads"]),
    )


def _ids(tokens: Sequence[Mapping[str, Any] | None]) -> list[int]:
    return [token["id"] for token in tokens if token is not None]


def sweep_of(answer: Mapping[str, Any]) -> Sweep:
    """Build a Sweep from the hub's answer."""
    names = ("state", "metric", "layers", "strengths", "positions", "digests", "ids")
    return Sweep(id=answer["sweep"], values=floats(answer["values"]), **{name: answer[name] for name in names})


def ended(
    connection: HubConnection, path: str, *, timeout_s: float, progress: Callable[[Mapping[str, Any]], None] | None
) -> Mapping[str, Any]:
    """Ask for a comparison or a sweep until it has ended. `progress` gets each answer before.

    Raises:
        ScopeError: it failed.
        TimeoutError: it has not ended within the time; it continues.
    """
    end = time.monotonic() + timeout_s
    while True:
        answer: Mapping[str, Any] = connection.get(path).json()
        if answer["state"] not in {"queued", "running"}:
            break
        if progress is not None:
            progress(answer)
        if time.monotonic() + POLL_S > end:
            raise TimeoutError(f"{path.partition('?')[0]} has not ended within {timeout_s:g} s")
        time.sleep(POLL_S)
    if (error := answer["error"]) is not None:
        raise ScopeError(error["message"], code=error["code"], hint=error["hint"])
    return answer
