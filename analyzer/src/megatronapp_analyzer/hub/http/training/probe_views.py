"""Probe texts of a training as answers show them."""

import math
from collections.abc import Mapping

import numpy as np

from megatronapp_analyzer.hub.http.training import probe_schemas as schemas
from megatronapp_analyzer.hub.state.probe_store import ProbeStore
from megatronapp_common.scope.probe_texts import ProbePart, block_of


def probes_view(store: ProbeStore) -> schemas.Probes:
    """Return the texts and the steps."""
    numbers = sorted(store.texts)
    found = [store.texts[number] for number in numbers]
    return schemas.Probes(
        texts=[
            schemas.ProbeText(text=text.source, tokens=list(text.strings), block=block_of(len(text.strings)))
            for text in found
        ],
        steps=[
            schemas.ProbedStepView(
                step=step.step,
                attempt=step.attempt,
                mean_logprobs=[_finite(step.mean_logprobs.get(number, math.nan)) for number in numbers],
                perturbation=step.perturbation,
            )
            for step in store.steps
        ],
        layers=sorted(store.layers),
        heads=store.heads,
    )


def result_view(store: ProbeStore, step: int, text: int) -> schemas.ProbeResult | None:
    """Return the numbers of a text after a step; None without any."""
    parts = list(store.parts(step, text))
    if not parts:
        return None
    norms = _norms(parts)
    predicted = next((part for part in parts if part.kind == "predictions"), None)
    return schemas.ProbeResult(
        step=step,
        text=text,
        logprobs=[] if predicted is None else [*map(_finite, predicted.arrays[0][:-1].tolist()), None],
        candidates=[] if predicted is None else _candidates(predicted),
        layers=sorted(norms),
        norms=[[_finite(value) for value in norms[layer].tolist()] for layer in sorted(norms)],
    )


def attention_view(store: ProbeStore, step: int, text: int, layer: int, head: int) -> schemas.ProbeAttention | None:
    """Return the attention of a head over a text; None if no rank has sent it."""
    for part in store.parts(step, text):
        if part.kind != "attention" or part.layer != layer or not 0 <= head - part.first < len(part.arrays[0]):
            continue
        return schemas.ProbeAttention(
            step=step,
            text=text,
            layer=layer,
            head=head,
            block=block_of(part.tokens),
            probabilities=(part.arrays[0][head - part.first] / 255).round(4).tolist(),
        )
    return None


def _norms(parts: list[ProbePart]) -> Mapping[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for part in parts:
        if part.kind == "norms":
            row = found.setdefault(part.layer, np.full(part.tokens, np.nan, np.float32))
            row[part.first : part.first + len(part.arrays[0])] = part.arrays[0]
    return found


def _candidates(part: ProbePart) -> list[list[schemas.ProbeCandidate]]:
    assert isinstance(part.strings, Mapping)
    _, ids, logprobs = part.arrays
    return [
        [
            schemas.ProbeCandidate(token=part.strings.get(str(token), f"<{token}>"), logprob=logprob)
            for token, logprob in zip(row.tolist(), values.tolist(), strict=True)
            if math.isfinite(logprob)
        ]
        for row, values in zip(ids, logprobs, strict=True)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
