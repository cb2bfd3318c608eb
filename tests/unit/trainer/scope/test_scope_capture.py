"""Every number that ranks send is that of plain torch on the same weights, in every layout."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from capturing_ranks import BASIS_LAYERS, CAPTURE, LENGTHS, NEW, PROBED, RUN, basis_frame, capture, pooled, reference
from generating_ranks import LAYOUTS, MORE_VARIANTS, VARIANTS
from pytest_workers import FULL

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.parts.merge import ShardTensor, rows_of, shard_tensors_of
from megatronapp_analyzer.scope.parts.merge import merge as merged
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.views.encode import attention_rows
from megatronapp_common.frames import Frame, FrameType, decode, split
from megatronapp_common.scope.protocol import TEMPERATURES, unpack
from megatronapp_common.scope.protocol_requests import CaptureSettings

pytestmark = pytest.mark.torch
RunRanks = Callable[..., list[Any]]
ALL = VARIANTS | MORE_VARIANTS
BY_LAYOUT: dict[str, tuple[str, ...]] = (
    {
        "alone": ("learned-tied", "rotary-grouped", "rotary-tied-window", "rotary-one-key-head"),
        "TP2": ("rotary-one-key-head", "rotary-grouped"),
        "PP2": ("learned-tied", "rotary-one-key-head"),
        "PP2-uneven": ("learned-tied",),
        "TP2xPP2": ("learned-tied", "rotary-grouped"),
    }
    if FULL
    else {
        "alone": ("rotary-tied-window",),
        "PP2-uneven": ("learned-tied",),
        "TP2xPP2": ("rotary-one-key-head",),  # a head of two ranks; test_scope_chain has one of each rank
    }
)


class Seen:
    """Frames of all ranks of a variant, and the reference."""

    def __init__(self, ranks: list[list[bytes]], probes: dict[str, str], truth: list[dict[str, Any]]) -> None:
        self.truth = truth
        self.probes = probes
        self.frames: list[tuple[int, Frame]] = []
        self.hellos = [decode(frames[0]) for frames in ranks]
        for hello, frames in zip(self.hellos, ranks, strict=True):
            self.frames += [(hello.header["coordinates"]["tp"], decode(data)) for data in frames[1:]]

    def shards(self, **of: Any) -> list[ShardTensor]:
        parts = [(tp, frame) for tp, frame in self.frames if frame.type == FrameType.SCOPE_PART]
        chosen = [
            (tp, frame) for tp, frame in parts if all(frame.header.get(name) == value for name, value in of.items())
        ]
        return [shard for tp, frame in chosen for shard in shard_tensors_of(frame, tp)]

    def tables(self, **of: Any) -> dict[str, Any]:
        named: dict[str, list[ShardTensor]] = defaultdict(list)
        for shard in self.shards(**of):
            if shard.tensor.name != "atlas":
                named[shard.tensor.name].append(shard)
        if of.get("run"):
            named.pop("attention", None)
        return {name: merged(shards) for name, shards in named.items()}


@functools.cache
def layout_seen(run_ranks: RunRanks, layout: str) -> dict[str, Seen]:
    world, flags = LAYOUTS[layout]
    variants = {name: ALL[name] for name in BY_LAYOUT[layout]}
    found = run_ranks(world, capture, flags, variants)
    tokens = {name: found[0][name][1] for name in variants}
    (truth,) = run_ranks(1, reference, variants, tokens)
    return {name: Seen([rank[name][0] for rank in found], found[0][name][2], truth[name]) for name in variants}


def close(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Compare within some roundings of the largest number."""
    largest = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * largest, err_msg=what)


CASES = [(layout, name) for layout, names in BY_LAYOUT.items() for name in names]


@pytest.fixture
def seen(run_ranks: RunRanks, request: pytest.FixtureRequest) -> Seen:
    layout, name = request.param
    return layout_seen(run_ranks, layout)[name]


def every(test: Any) -> Any:
    ids = ["-".join(case) for case in CASES]
    return pytest.mark.parametrize("seen", CASES, ids=ids, indirect=True)(test)


def heads_of(shard: ShardTensor) -> range:
    assert shard.span is not None
    return range(*shard.span)


def step_rows(step: int) -> list[tuple[int, int]]:
    return [(sample, length - 1 + step) for sample, length in enumerate(LENGTHS)]


def rows_of_site(seen: Seen, site: str, rows: Any) -> np.ndarray:
    return np.stack([seen.truth[sample][site][position] for sample, position in rows])


def expected_tables(seen: Seen, rows: Any) -> dict[str, np.ndarray]:
    def flat(site: str) -> np.ndarray:
        values = rows_of_site(seen, site, rows)
        return values.reshape(len(rows), values.shape[1], -1)

    out = {name: pooled(flat(name), 8) for name in "qkv"}
    out |= {name: pooled(flat(name), 16) for name in ("mlp1", "mlp2")}
    after = flat("residual").astype(np.float64)
    before = np.concatenate([rows_of_site(seen, "embedding", rows)[:, None], after[:, :-1]], axis=1)
    norms = np.linalg.norm(before, axis=-1), np.linalg.norm(after, axis=-1)
    out["residual.norm"] = norms[1]
    out["residual.change"] = np.linalg.norm(after - before, axis=-1) / norms[0]
    out["residual.cosine"] = (before * after).sum(-1) / norms[0] / norms[1]
    mean, axes = (tensor.data for tensor in unpack(basis_frame(after.shape[-1])))
    out["pca"] = np.einsum("rlh,lch->rlc", after[:, BASIS_LAYERS] - mean, axes)
    return out | head_tables(seen, rows)


def head_tables(seen: Seen, rows: Any) -> dict[str, np.ndarray]:
    chances = [seen.truth[sample]["attention"][:, :, position].astype(np.float64) for sample, position in rows]
    entropies = []
    for probabilities in chances:
        keys = (probabilities > 0).sum(-1)
        logs = np.log(probabilities, out=np.zeros_like(probabilities), where=probabilities > 0)
        entropies.append(-(probabilities * logs).sum(-1) / np.maximum(np.log(keys), 1e-9))
    return {
        "head.entropy": np.stack(entropies),
        "head.max": np.stack([probabilities.max(-1) for probabilities in chances]),
        "head.sink": np.stack([probabilities[..., 0] for probabilities in chances]),
    }


@every
def test_tables_of_steps(seen: Seen) -> None:
    for step in range(NEW):
        tables = seen.tables(run=RUN, step=step)
        rows = tables["q"].rows
        assert set(step_rows(step)) <= set(rows)
        expected = expected_tables(seen, rows)
        assert set(tables) == set(expected)
        for name, table in tables.items():
            layers = tuple(BASIS_LAYERS) if name == "pca" else (0, 1, 2, 3)
            assert (table.rows, table.layers) == (rows, layers), name
            close(table.data, expected[name], f"{name}, step {step}")


@every
def test_pinned_rows(seen: Seen) -> None:
    for step in range(1, NEW):
        rows = attention_rows(seen.shards(run=RUN, step=step))
        expected = [(sample, *pin, place) for sample, place in step_rows(step) for pin in ((1, 2), (3, 0))]
        assert sorted(row[:4] for row in rows) == sorted(expected)
        for sample, layer, head, position, codes in rows:
            truth = seen.truth[sample]["attention"][layer, head, position, : position + 1]
            np.testing.assert_allclose(codes, 255 * np.sqrt(truth), atol=0.51)


@every
def test_atlases(seen: Seen) -> None:
    shards = [shard for shard in seen.shards(run=RUN, step=0) if shard.tensor.name == "atlas"]
    for sample, length in enumerate(LENGTHS):
        truth = seen.truth[sample]["attention"][:, :, :length, :length]
        edges = [index * length // 8 for index in range(9)]
        mine = [shard for shard in shards if shard.rows[0][0] == sample]
        assert sum(len(shard.layers or ()) * len(heads_of(shard)) for shard in mine) == 16
        for shard in mine:
            part = truth[np.ix_(shard.layers or (), heads_of(shard))]
            for y in range(8):
                for x in range(8):
                    cell = part[..., edges[y] : edges[y + 1], edges[x] : edges[x + 1]].max(axis=(2, 3), initial=0)
                    np.testing.assert_allclose(shard.tensor.data[..., y, x], 255 * np.sqrt(cell), atol=0.51)


@every
def test_probes_return_exact_numbers(seen: Seen) -> None:
    lengths = [length + NEW - 1 for length in LENGTHS]
    rows = tuple((sample, position) for sample, length in enumerate(lengths) for position in range(length))
    for site in (*PROBED, "q before", "k before"):
        shards = seen.shards(probe=seen.probes[site])
        assert {shard.tensor.extra.get("rotary") for shard in shards} == {"before" if "before" in site else None}
        table = seen.tables(probe=seen.probes[site])[site.split()[0]]
        assert table.rows == rows, site
        close(table.data, rows_of_site(seen, site, rows), site)


@every
def test_probes_of_attention(seen: Seen) -> None:
    shards = seen.shards(probe=seen.probes["attention"])
    assert {shard.tensor.data.shape[-1] for shard in shards} == {max(LENGTHS) + NEW - 1}
    rows_sent = 0
    for shard in shards:
        for place, (sample, position) in enumerate(shard.rows):
            for at, layer in enumerate(shard.layers or ()):
                for index, head in enumerate(heads_of(shard)):
                    row = shard.tensor.data[place, at, index]
                    truth = seen.truth[sample]["attention"][layer, head, position]
                    np.testing.assert_allclose(row[: len(truth)], truth, atol=1e-5)
                    assert not row[len(truth) :].any()
                    rows_sent += 1
    assert rows_sent == 2 * 3 * sum(length + NEW - 1 for length in LENGTHS)
    codes = attention_rows(seen.shards(probe=seen.probes["attention codes"]))
    assert [row[:4] for row in codes] == [(sample, 2, 2, place) for sample in range(3) for place in (2, 4, 6)]


@every
def test_every_rank_reports_once_whole(seen: Seen) -> None:
    """The last frame of a rank for a step or probe, and only that one, says that no more follows."""
    last: dict[Any, list[bool]] = defaultdict(list)
    for _, frame in seen.frames:
        if frame.type == FrameType.SCOPE_PART:
            rows_of(frame.header["rows"])
            key = (frame.header["rank"], frame.header.get("probe") or frame.header["step"])
            assert frame.header["part"] == len(last[key])
            has_pca = any(tensor["n"] == "pca" for tensor in frame.header["tensors"])
            assert frame.header.get("pcaVersion") == (1 if has_pca else None)
            last[key].append(frame.header["more"])
    assert len(last) == len(seen.hellos) * (NEW + len(seen.probes))
    assert all(more_follow[-1] is False and all(more_follow[:-1]) for more_follow in last.values())


@every
def test_token_frames_describe_the_distributions(seen: Seen) -> None:
    frames = {frame.header["step"]: frame for _, frame in seen.frames if frame.type == FrameType.SCOPE_TOKENS}
    assert sorted(frames) == list(range(NEW))
    for step, frame in frames.items():
        assert [tuple(row) for row in frame.header["rows"]] == step_rows(step)
        assert frame.header["finished"] == (["length"] * 3 if step == NEW - 1 else [None] * 3)
        logits = rows_of_site(seen, "logits", step_rows(step)).astype(np.float64)
        expected = np.log(np.exp(logits[..., None] / np.array(TEMPERATURES)).sum(1))
        tensors = {tensor.name: tensor.data for tensor in unpack(frame)}
        logs = logits - expected[:, 5, None]
        best = np.argsort(-logits, axis=-1)[:, :5]
        close(tensors["partition"], expected, "")
        np.testing.assert_array_equal(tensors["top.id"], best)
        assert frame.header["topTexts"] == [[f"<{token}>" for token in row] for row in best]
        close(tensors["top.logit"], np.take_along_axis(logits, best, -1), "")
        np.testing.assert_allclose(tensors["top.p"], np.exp(np.take_along_axis(logs, best, -1)), atol=1e-3)
        close(tensors["entropy"], -(np.exp(logs) * logs).sum(-1), "")
        chosen = np.array(frame.header["ids"])[:, None]
        close(tensors["surprise"], -np.take_along_axis(logs, chosen, -1)[:, 0], "")


@every
def test_a_hub_makes_whole_steps_of_it(seen: Seen) -> None:
    """The real core, fed rank by rank: no gaps, no errors, an overview of each prompt."""
    core = ScopeCore(ScopeSettings(job="tiny"), clock=lambda: 0.0)
    for worker, hello in enumerate(seen.hellos):
        core.ingest.take_frame(0, worker, hello)
    core.ingest.take_frame(0, 0, run_state())
    for _, frame in seen.frames:
        core.ingest.take_frame(0, 0, frame)
    assert core.ingest.rejected.count == 0
    frames = list(split(session_file.dump(core.feed, RUN)))
    kinds = [frame.type for frame in frames]
    assert FrameType.SCOPE_GAP not in kinds
    assert [frame.header["step"] for frame in frames if frame.type == FrameType.SCOPE_STEP] == list(range(NEW))
    overviews = {frame.header["sample"]: frame for frame in frames if frame.type == FrameType.SCOPE_OVERVIEW}
    assert sorted(overviews) == [0, 1, 2]
    for sample, length in enumerate(LENGTHS):
        assert overviews[sample].header["positions"] == list(range(length))
        assert "atlas" in {tensor.name for tensor in unpack(overviews[sample])}
    steps = [frame for frame in frames if frame.type == FrameType.SCOPE_STEP]
    named = [{tensor.name: tensor for tensor in unpack(step_frame)} for step_frame in steps]
    assert all({"q", "mlp1", "head.max", "residual.norm", "top.id", "partition"} <= set(table) for table in named)
    expected = head_tables(seen, step_rows(2))["head.max"]
    np.testing.assert_allclose(named[2]["head.max"].data / 255, expected, atol=0.003)


def run_state() -> Frame:
    header = {
        "run": RUN,
        "state": "decoding",
        "position": None,
        "prompts": [{"text": "", "ids": [1] * length, "offsets": [None] * length} for length in LENGTHS],
        "sampling": {"temperature": 0.0, "topK": 0, "topP": 1.0, "seed": 0, "stop": []},
        "capture": CaptureSettings.model_validate(CAPTURE).model_dump(mode="json", by_alias=True),
        "tokens": NEW,
        "error": None,
        "startedAt": 0.0,
        "tokensPerSecond": None,
    }
    return Frame(FrameType.SCOPE_RUN_STATE, header)
