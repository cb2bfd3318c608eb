"""Attribution of logits and scores of heads equal plain torch's, on every layout."""

from collections.abc import Callable
from typing import Any

import analyzing_ranks
import numpy as np
import pytest
import torch
from generating_ranks import LAYOUTS, VARIANTS
from torch.nn import functional

from megatronapp_common.scope.analysis_requests import AttributionRequest, HeadScoreRequest
from megatronapp_trainer.scope.analysis import attribution
from megatronapp_trainer.scope.analysis.head_scores import score_weights

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
CHECKED = {name: VARIANTS[name] for name in ("learned-tied", "rotary-grouped")}
ROW, TOKEN, AGAINST, NEURONS = 21, 7, 101, 6


def bodies() -> dict[str, Any]:
    text = tuple(analyzing_ranks.text())
    return {
        "one": AttributionRequest(ids=text[: ROW + 2], row=ROW, token=TOKEN, neurons=NEURONS),
        "two": AttributionRequest(ids=text, row=ROW, token=TOKEN, against=AGAINST, neurons=NEURONS, order="activation"),
        "heads": HeadScoreRequest(ids=(*text, *text)[:60]),
    }


def expected(variants: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return, by variant, what plain torch computes one after another."""
    return {name: plain_contributions(model) for name, model in analyzing_ranks.plain(variants).items()}


def plain_contributions(model: Any) -> dict[str, Any]:
    text = analyzing_ranks.text()
    sites, weights, shape = model.sites(text), model._weights, model._shape
    unembedding = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
    residual = torch.from_numpy(sites["residual"])[ROW, -1]
    direction = unembedding[TOKEN] * weights["decoder.final_layernorm.weight"]
    if shape.rms:
        direction = direction / (residual.square().mean() + shape.eps).sqrt()
    else:
        direction = (direction - direction.mean()) / (residual.var(unbiased=False) + shape.eps).sqrt()
    repeats = shape.heads // shape.key_heads
    heads, mlp, activations, contributions = [], [], [], []
    for layer in range(shape.layers):
        values = torch.from_numpy(sites["v"])[: ROW + 1, layer].repeat_interleave(repeats, dim=1)
        attention = torch.from_numpy(sites["attention"])[layer, :, ROW, : ROW + 1]
        context = torch.einsum("hk,khd->hd", attention, values)
        prefix = f"decoder.layers.{layer}."
        output = weights[prefix + "self_attention.linear_proj.weight"].view(-1, shape.heads, shape.channels)
        heads.append(torch.einsum("hd,ohd,o->h", context, output, direction))
        mlp1 = torch.from_numpy(sites["mlp1"])[ROW, layer]
        gate, up = mlp1.chunk(2)
        activation = functional.silu(gate) * up if shape.swiglu else functional.gelu(mlp1)
        fc2 = weights[prefix + "mlp.linear_fc2.weight"]
        mlp.append((fc2 @ activation) @ direction)
        activations.append(activation)
        contributions.append(activation * (fc2.T @ direction))
    logits = torch.from_numpy(sites["logits"])[ROW]
    whole = model.sites((text + text)[:60])["attention"]
    return {
        "heads": torch.stack(heads).numpy(),
        "mlp": torch.stack(mlp).numpy(),
        "embedding": float(torch.from_numpy(sites["embedding"])[ROW] @ direction),
        "activations": torch.stack(activations).numpy(),
        "contributions": torch.stack(contributions).numpy(),
        "logits": logits.numpy(),
        "scores": plain_scores(whole, (text + text)[:60]),
    }


def plain_scores(attention: Any, text: list[int]) -> Any:
    """Return [layers, heads, scores] by the definitions, query by query."""
    found: list[list[Any]] = [[], [], [], []]
    for query in range(1, len(text)):
        rows = attention[:, :, query]
        found[0].append(rows[..., query - 1])
        found[1].append(rows[..., 0])
        same = [key for key in range(query) if text[key] == text[query]]
        if same:
            found[2].append(rows[..., same].sum(-1))
        after = [key + 1 for key in same if key + 1 < query]
        if after:
            found[3].append(rows[..., after].sum(-1))
    return np.stack([np.mean(score, axis=0) for score in found], axis=-1)


@pytest.mark.parametrize(
    "layout", ["TP2xPP2", *(pytest.param(name, marks=pytest.mark.full("every layout")) for name in LAYOUTS)]
)
def test_contributions_of_components_and_scores_of_heads_equal_plain_torch(run_ranks: RunRanks, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    found = run_ranks(count, analyzing_ranks.analyze, flags, CHECKED, bodies())[0]
    (truth,) = run_ranks(1, expected, CHECKED)
    for variant in CHECKED:
        check_logit(found[variant]["one"], truth[variant])
        check_difference(found[variant]["two"], truth[variant])
        header, tensors = found[variant]["heads"]
        assert header["scores"] == ["previous", "first", "duplicate", "induction"]
        np.testing.assert_allclose(tensors["scores"], truth[variant]["scores"], atol=1e-5)


def total(header: dict[str, Any], tensors: dict[str, Any]) -> float:
    layers = sum(float(tensors[name].sum()) for name in ("heads", "attention_bias", "mlp", "mlp_bias"))
    return float(layers + header["embedding"] + header["constant"])


def check_logit(answer: tuple[Any, Any], truth: dict[str, Any]) -> None:
    header, tensors = answer
    np.testing.assert_allclose(tensors["heads"], truth["heads"], rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(tensors["mlp"], truth["mlp"], rtol=1e-5, atol=2e-5)
    assert header["embedding"] == pytest.approx(truth["embedding"], abs=2e-5)
    assert header["logit"] == pytest.approx(float(truth["logits"][TOKEN]), abs=2e-5)
    assert total(header, tensors) == pytest.approx(header["logit"], abs=5e-5)
    strongest = np.argsort(-np.abs(truth["contributions"]), axis=-1, kind="stable")[:, :NEURONS]
    assert tensors["neuron.index"].tolist() == strongest.tolist()
    contributions = np.take_along_axis(truth["contributions"], strongest, -1)
    np.testing.assert_allclose(tensors["neuron.contribution"], contributions, rtol=1e-5, atol=2e-5)


def check_difference(answer: tuple[Any, Any], truth: dict[str, Any]) -> None:
    header, tensors = answer
    difference = float(truth["logits"][TOKEN] - truth["logits"][AGAINST])
    assert header["logit"] == pytest.approx(difference, abs=2e-5)
    assert total(header, tensors) == pytest.approx(difference, abs=5e-5)
    strongest = np.argsort(-np.abs(truth["activations"]), axis=-1, kind="stable")[:, :NEURONS]
    assert tensors["neuron.index"].tolist() == strongest.tolist()
    activations = np.take_along_axis(truth["activations"], strongest, -1)
    np.testing.assert_allclose(tensors["neuron.activation"], activations, rtol=1e-5, atol=2e-5)


def test_weights_are_multiplied_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, direction = torch.randn(6, 11).bfloat16(), torch.randn(6)
    monkeypatch.setattr(attribution, "BLOCK_NUMBERS", 18)
    torch.testing.assert_close(attribution.through(weight, direction), weight.float().t() @ direction)


def test_induction_counts_keys_after_earlier_copies_of_the_token() -> None:
    ids = torch.tensor([5, 6, 5, 5])
    previous, first, duplicate, induction = score_weights(ids, torch.arange(4)).tolist()
    assert previous == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert first == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert duplicate == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]
    assert induction == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
