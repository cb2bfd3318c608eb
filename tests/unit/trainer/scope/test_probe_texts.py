"""Probe texts of a training: what plain PyTorch computes, in every layout, and no bit of the training is changed."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured_training import CAPTURED, FLAGS, train
from evaluated_training import MODEL
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.frames import Frame, FrameType, decode
from megatronapp_common.scope.layer_statistics import read_statistics
from megatronapp_common.scope.probe_texts import blocks_of

RunRanks = Callable[..., list[Any]]
Key = tuple[str, int, int]
TEXTS = ["the whale dives", "a ship, a ship and the sea", "sea"]
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LAYOUTS = {
    "DP2": (2, f"{DROPOUT} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "SP2xPP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "dynamic": (2, "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    "pair": (2, f"--forward-backward-disaggregating {DROPOUT}"),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    from megatronapp_trainer.data import tokenizer

    path: pathlib.Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.train(TEXTS, 280).backend.save(str(path))
    return f"--tokenizer-file {path} --vocab-size 290"


def with_texts(flags: str) -> str:
    texts = json.dumps(TEXTS, separators=(",", ":")).replace(" ", r"\u0020")  # flags are split at blanks
    return f"{flags} --scope-probe-texts {texts}"


def arrays(frame: Frame) -> list[np.ndarray[Any, Any]]:
    found, place = [], 0
    for dtype, shape in frame.header["arrays"]:
        found.append(np.frombuffer(frame.body, dtype, int(np.prod(shape)), place).reshape(shape))
        place += found[-1].nbytes
    return found


def merged(ranks: list[dict[str, Any]]) -> dict[Key, Any]:
    """Results of all ranks by kind, text and layer, put together."""
    found: dict[Key, Any] = {}
    frames = [decode(data) for rank in ranks for data in rank["frames"]]
    for frame in sorted(
        (frame for frame in frames if frame.type == FrameType.TRAINING_PROBE),
        key=lambda frame: frame.header.get("first", 0),
    ):
        header = frame.header
        assert header["step"] == CAPTURED
        key = (header["kind"], header["text"], header.get("layer", -2))
        parts = arrays(frame)
        if header["kind"] == "text":
            found[key] = header["strings"]
        elif header["kind"] == "predictions":
            found[key] = parts
        else:
            found[key] = np.concatenate((found[key], parts[0])) if key in found else parts[0]
    return found


def plain(flags: str) -> dict[Key, Any]:
    """Results of the texts by torch alone, each run by itself, with the weights after the captured step."""
    import small_training
    import torch

    from megatronapp_trainer.data import tokenizer

    run = small_training.prepare(f"{MODEL} {FLAGS} {flags}")
    trainer = small_training.trainer_of(run)
    for _ in range(CAPTURED):
        trainer.step()
    model = run.state.chunks[0].module.eval()
    reader = tokenizer.load(vocab_file=None, merge_file=None, tokenizer_file=run.config.data.tokenizer_file)
    found: dict[Key, Any] = {}
    taken: dict[Any, Any] = {}

    def keep(name: Any) -> Any:
        return lambda _module, inputs, output: taken.__setitem__(name, (inputs, output))

    model.embedding.register_forward_hook(keep(-1))
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(keep(number))
        layer.self_attention.core_attention.register_forward_hook(keep(("attention", number)))
    for place, text in enumerate(TEXTS):
        tokens = torch.tensor([reader.tokenize(text)])
        length = tokens.size(1)
        with torch.no_grad():
            logits = model(tokens, torch.arange(length)[None], None)[0, :, :290].double()
        logprobs = logits.log_softmax(-1)
        followers = logprobs.gather(1, tokens[0].roll(-1)[:, None])[:, 0]
        best = logprobs.topk(5)
        found["predictions", place, -2] = [followers.numpy(), best.indices.numpy(), best.values.numpy()]
        found["text", place, -2] = [reader.detokenize([int(token)]) for token in tokens[0]]
        for name, (inputs, output) in taken.items():
            if isinstance(name, int):
                hidden = output[0] if isinstance(output, tuple) else output
                found["norms", place, name] = hidden[:, 0].detach().double().norm(dim=-1).numpy()
                continue
            query, key = (part[:, 0].detach().transpose(0, 1).double() for part in inputs[:2])
            scores = query @ key.transpose(1, 2) / query.size(-1) ** 0.5
            hidden = torch.ones(length, length).triu(1).bool()
            found["attention", place, name[1]] = scores.masked_fill(hidden, -torch.inf).softmax(-1).numpy()
    return found


@pytest.fixture(scope="module")
def expected(run_ranks: RunRanks, flags: str) -> dict[Key, Any]:
    (found,) = run_ranks(1, plain, flags)
    return dict(found)


@pytest.mark.torch
@pytest.mark.full("all layouts", but=("SP2xPP2", "pair"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_those_of_the_model_and_training_is_bit_equal(
    run_ranks: RunRanks, expected: dict[Key, Any], flags: str, layout: str
) -> None:
    size, own = LAYOUTS[layout]
    ranks = run_ranks(size, train, f"{with_texts(flags)} {own}", True)
    off = run_ranks(size, train, f"{flags} {own}", False)
    for name in ("losses", "norms"):
        assert [rank[name] for rank in ranks] == [rank[name] for rank in off]
    found = merged(ranks)
    assert found.keys() == expected.keys()
    if DROPOUT in own:  # other weights than those of the plain run
        return
    for key, value in expected.items():
        if key[0] == "text":
            assert found[key] == value
        elif key[0] == "norms":
            np.testing.assert_allclose(found[key], value, rtol=1e-3, err_msg=str(key))
        elif key[0] == "attention":
            np.testing.assert_allclose(found[key] / 255, value, atol=0.004, err_msg=str(key))
        else:
            np.testing.assert_allclose(found[key][0][:-1], value[0][:-1], atol=2e-3)
            np.testing.assert_allclose(found[key][2], value[2], atol=2e-3)


@pytest.mark.torch
@pytest.mark.full("50 steps")
@pytest.mark.parametrize("layout", ["DP2", "pair"])
def test_fifty_losses_are_bit_equal_with_captures_every_five_steps(
    run_ranks: RunRanks, flags: str, layout: str
) -> None:
    size, own = LAYOUTS[layout]
    own = f"{own} --bf16 --train-iters 50"
    ranks = run_ranks(size, train, f"{with_texts(flags)} {own} --scope-capture-interval 5", True)
    off = run_ranks(size, train, f"{flags} {own}", False)
    for name in ("losses", "norms"):
        assert [rank[name] for rank in ranks] == [rank[name] for rank in off]
    frames = [decode(data) for rank in ranks for data in rank["frames"]]
    assert {frame.header["step"] for frame in frames} == set(range(5, 51, 5))
    read = [read_statistics(frame) for frame in frames if frame.type == FrameType.TRAINING_STATISTICS]
    updates = [
        record for found in read for row, record in zip(*found, strict=True) if row.site == "update" and record["count"]
    ]  # without those of layers of which a rank has no shard
    assert len(updates) >= 10 * 5 and all(record["squares"] > 0 == record["nan"] for record in updates)


@pytest.mark.torch
@given(length=st.integers(1, 200), seed=st.integers(0, 99))
def test_rows_of_pooled_maps_have_the_sum_1(length: int, seed: int) -> None:
    import torch

    from megatronapp_trainer.scope.texts.text_hooks import pooled

    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(2, length, length, generator=generator).tril().add(1e-6).tril()
    rows = pooled(chances / chances.sum(-1, keepdim=True)).float() / 255
    blocks = blocks_of(length)
    assert rows.shape == (2, blocks, blocks) and blocks <= 64
    assert torch.allclose(rows.sum(-1), torch.ones(2, blocks), atol=0.5 * blocks / 255)
    assert not rows.triu(1).any()
