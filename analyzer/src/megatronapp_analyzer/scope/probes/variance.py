"""Total variance of the hidden states of a run at one layer: what the shares of principal components refer to."""

import dataclasses

import numpy as np

from megatronapp_analyzer.scope.probes import pca
from megatronapp_analyzer.scope.probes.probe_client import ProbeClient
from megatronapp_analyzer.scope.store.run import ScopeRun
from megatronapp_common.scope.protocol_requests import ProbeSite
from megatronapp_common.web.problems import HttpError

SITE = "residual"
MAX_BYTES = 16 << 20
"""Bytes of hidden states that are read, with a stride over rows of a longer text."""


@dataclasses.dataclass(frozen=True, slots=True)
class VarianceSum:
    """Sum of the variances of all features of `rows` tokens."""

    rows: int
    variance: float


async def variance_of(probe_client: ProbeClient, run: ScopeRun, layer: int, caller: str) -> VarianceSum | str:
    """Return the variance over all tokens that were read, or the id of a probe that fetches their states.

    Raises HttpError.
    """
    model = probe_client.core.publishers.model
    tokens = sum(run.length(sample) for sample in range(len(run.tokens)))
    if tokens < 2:
        raise HttpError(404, "outside", f"{tokens} tokens have no variance", "Two tokens have one.")
    every = max(1, -(-tokens * (model["hidden"] if model else 1) * 4 // MAX_BYTES))
    states = []
    for sample in range(len(run.tokens)):
        wanted = range(0, run.length(sample), every)
        rows = run.values.get((SITE, sample, layer, None))
        if any(place not in rows for place in wanted):
            return await probe_client.probe(run, sample, ProbeSite(site=SITE, layers=(layer,)), wanted, caller)
        states += [rows[place] for place in wanted]
    return VarianceSum(rows=len(states), variance=pca.total_variance(np.stack(states)))
