"""The logit lens of the ranks equals plain torch's, on every layout."""

from collections.abc import Callable
from typing import Any

import analyzing_ranks
import numpy as np
import pytest
import torch
from generating_ranks import LAYOUTS, VARIANTS, VOCABULARY

from megatronapp_common.scope.analysis_requests import LensRequest
from megatronapp_trainer.hooks.errors import CaptureError
from megatronapp_trainer.scope.analysis import logit_lens
from megatronapp_trainer.scope.analysis.analysis_service import check_token

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
CHECKED = {name: VARIANTS[name] for name in ("learned-tied", "rotary-grouped")}
TOP = 7
ROWS = (13, 37)
LAYERS = (0, 3, 2)
TOKEN = 11


def body() -> LensRequest:
    return LensRequest(ids=tuple(analyzing_ranks.text()), rows=ROWS, layers=LAYERS, top=TOP, token=TOKEN)


def plain_lens(variants: dict[str, str]) -> dict[str, torch.Tensor]:
    """Log-probabilities of plain torch, [layers, rows, vocabulary], by variant."""
    out = {}
    for name, model in analyzing_ranks.plain(variants).items():
        residual = torch.from_numpy(model.sites(analyzing_ranks.text())["residual"])[slice(*ROWS), list(LAYERS)]
        weights = model._weights
        output = weights.get("output_layer.weight", weights["embedding.word_embeddings.weight"])
        logits = model._norm(residual.transpose(0, 1), "decoder.final_layernorm") @ output.T
        out[name] = logits[..., :VOCABULARY].log_softmax(-1)
    return out


@pytest.mark.parametrize(
    "layout", ["TP2xPP2", *(pytest.param(name, marks=pytest.mark.full("every layout")) for name in LAYOUTS)]
)
def test_residuals_of_all_layers_are_read_through_norm_and_unembedding(run_ranks: RunRanks, layout: str) -> None:
    count, flags = LAYOUTS[layout]
    own = LensRequest(ids=analyzing_ranks.prompt_of_other(), rows=(8, 9), layers=(3,))
    found = run_ranks(count, analyzing_ranks.analyze, flags, CHECKED, {"lens": body(), "own": own})[0]
    (truth,) = run_ranks(1, plain_lens, CHECKED)
    for variant in CHECKED:
        check(found[variant]["lens"], truth[variant])
        _, last = found[variant]["own"]
        candidates = found[variant]["candidates"]
        assert last["lens.id"].reshape(-1).tolist() == [token for token, _ in candidates]
        # The kernels are the same; the products of other numbers of rows may be rounded otherwise.
        assert last["lens.logprob"].reshape(-1) == pytest.approx([logprob for _, logprob in candidates], abs=2e-6)
        assert len(found[variant]["tokens"]) == 6


def check(answer: tuple[dict[str, Any], dict[str, Any]], logs: torch.Tensor) -> None:
    header, tensors = answer
    best, tokens = logs.topk(TOP, dim=-1)
    assert (header["rows"], header["layers"], header["token"]) == (list(ROWS), list(LAYERS), TOKEN)
    assert tensors["lens.id"].tolist() == tokens.tolist()
    assert tensors["lens.logprob"] == pytest.approx(best.numpy(), abs=2e-5)
    assert tensors["lens.entropy"] == pytest.approx(-(logs.exp() * logs).sum(-1).numpy(), abs=2e-5)
    text = analyzing_ranks.text()
    followed = [*text[ROWS[0] + 1 :], -1]
    for name, watched in (("target", followed), ("token", [TOKEN] * len(followed))):
        for row, token in enumerate(watched):
            ranks, logprobs = tensors[f"lens.{name}.rank"][:, row], tensors[f"lens.{name}.logprob"][:, row]
            if token < 0:
                assert ranks.tolist() == [-1] * len(LAYERS)
                assert np.isnan(logprobs).all()
                continue
            mine = logs[:, row, token]
            assert ranks.tolist() == (logs[:, row] > mine[:, None]).sum(-1).tolist()
            assert logprobs == pytest.approx(mine.numpy(), abs=2e-5)
    assert dict(zip(header["tokens"], header["texts"], strict=True))[TOKEN] == f"<{TOKEN}>"


def test_an_analysis_without_memory_on_a_rank_ends_alone(run_ranks: RunRanks) -> None:
    count, flags = LAYOUTS["PP2"]
    tokens, chunks = run_ranks(count, analyzing_ranks.without_memory, flags, body())[0]
    assert len(tokens) == 6
    assert chunks == [2] * 3


def test_logits_are_reduced_in_blocks_and_without_unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    columns = logit_lens.reduced(logits, 2, torch.tensor([[-1], [4], [0]]))
    assert columns.shape == (3, 2 * 2 + 1 + 2)
    assert columns[0, 5] == -1
    assert columns[1, 5] == (logits[1] > logits[1, 4]).sum()
    assert columns[2, 6] == pytest.approx(float(logits[2].log_softmax(0)[0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": (3, 3)}, "rows: 3 to 3 are not within the 4 tokens"),
        ({"rows": (0, 5)}, "rows: 0 to 5"),
        ({"layers": tuple(range(1 << 13))}, "cells of 5 tokens are too many"),
    ],
)
def test_a_wrong_request_is_refused_with_its_place(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LensRequest(**({"ids": (1, 2, 3, 4), "rows": (0, 4), "layers": (0,)} | fields))
    with pytest.raises(CaptureError, match="token: there is no token 9; the vocabulary has 9"):
        check_token("token", 9, 9)
