"""Results of analyses as arrays; what the numbers mean is in docs/reading-a-model.md."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A likely token at a position, with its probability at temperature 1."""

    id: int
    text: str | None
    probability: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Lens:
    """Logit lens: arrays over layers, then positions. Log-probabilities are natural logarithms."""

    layers: list[int]
    positions: list[int]
    """Positions that were read; each cell predicts the token after its position."""
    ids: NDArray[np.int64]
    """The likeliest tokens, [layers, positions, top]."""
    logprobs: NDArray[np.float64]
    """Their log-probabilities, [layers, positions, top]."""
    entropy: NDArray[np.float64]
    """Entropy of each distribution in nats."""
    target_rank: NDArray[np.float64]
    """Rank of the token that follows in the text, from 0; NaN where none does."""
    target_logprob: NDArray[np.float64]
    token_rank: NDArray[np.float64] | None
    """Rank of the requested token; None without one."""
    token_logprob: NDArray[np.float64] | None
    texts: Mapping[int, str]
    """Text of each token that is named, decoded alone."""

    @property
    def top_texts(self) -> list[list[str]]:
        """Return the text of the likeliest token of each layer and position."""
        return [[self.texts.get(int(token), f"<{token}>") for token in row] for row in self.ids[:, :, 0]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """Direct logit attribution: heads, MLPs, biases, `embedding` and `constant` sum to `logit`."""

    position: int
    token: int
    against: int | None
    logit: float
    embedding: float
    constant: float
    heads: NDArray[np.float64]
    """Contribution of each head, [layers, heads]."""
    attention_bias: NDArray[np.float64]
    mlp: NDArray[np.float64]
    mlp_bias: NDArray[np.float64]
    neuron_index: NDArray[np.int64]
    """The strongest neurons of each layer, [layers, neurons], numbered in the whole model."""
    neuron_activation: NDArray[np.float64]
    neuron_contribution: NDArray[np.float64]


def lens_of(answer: Mapping[str, Any]) -> Lens:
    """Build a Lens from the hub's answer."""
    return Lens(
        layers=answer["layers"],
        positions=answer["positions"],
        ids=np.array(answer["ids"], np.int64),
        logprobs=floats(answer["logprobs"]),
        entropy=floats(answer["entropy"]),
        target_rank=floats(answer["targetRank"]),
        target_logprob=floats(answer["targetLogprob"]),
        token_rank=None if answer["tokenRank"] is None else floats(answer["tokenRank"]),
        token_logprob=None if answer["tokenLogprob"] is None else floats(answer["tokenLogprob"]),
        texts=dict(zip(answer["tokens"], answer["texts"], strict=True)),
    )


def attribution_of(answer: Mapping[str, Any]) -> Attribution:
    """Build an Attribution from the hub's answer."""
    columns = {
        name: [[neuron[name] for neuron in layer] for layer in answer["neurons"]]
        for name in ("index", "activation", "contribution")
    }
    return Attribution(
        position=answer["position"],
        token=answer["token"],
        against=answer["against"],
        logit=answer["logit"],
        embedding=answer["embedding"],
        constant=answer["constant"],
        heads=floats(answer["heads"]),
        attention_bias=floats(answer["attentionBias"]),
        mlp=floats(answer["mlp"]),
        mlp_bias=floats(answer["mlpBias"]),
        neuron_index=np.array(columns["index"], np.int64),
        neuron_activation=floats(columns["activation"]),
        neuron_contribution=floats(columns["contribution"]),
    )


def floats(values: Any) -> NDArray[np.float64]:  # noqa: ANN401 - nested lists
    """Return nested lists as an array; null becomes NaN."""
    return np.array(values, np.float64)
