"""Frames that ranks of any layout would publish of a run of the tiny model: true numbers, and sessions made of them.

    python tests/support/scope/scope_session.py FILE.scope

writes a recorded session for the tests of the page.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scope_model import TinyGpt, TinyGptShape

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.probes import pca
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import TEMPERATURES, Tensor, build_frame

Array = NDArray[Any]
RUN = "0123456789ab"
CAPTURE: dict[str, Any] = {
    "preset": "default",
    "states": {"qkv": True, "attention": True, "mlp1": True, "mlp2": True, "probabilities": True, "pca": True},
    "pixels": {"qkv": 24, "mlp": 16},
    "expression": {"qkv": "data.mean(dim=-1)", "mlp": "data.mean(dim=-1)"},
    "rotary": "after",
    "pinned": [{"layer": 1, "head": 2}, {"layer": 3, "head": 0}],
    "candidates": 10,
}
SAMPLING = {"temperature": 0.8, "topK": 0, "topP": 1.0, "seed": 7, "stop": []}
VERSION = 1
"""Version of the basis."""
VERSION = 1
"""Version of the basis."""
FIRST_HALF, SECOND_HALF = 94, 95
"""Tokens that make one character together."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """A run with all its numbers. `sites` of a sample are those of `TinyGpt.forward` over the rows that were read."""

    shape: TinyGptShape
    prompts: list[list[int]]
    generated: list[list[int]]
    sites: list[dict[str, Array]]
    capture: dict[str, Any]

    @property
    def steps(self) -> int:
        return max(map(len, self.generated))

    def rows(self, step: int) -> list[tuple[int, int]]:
        """Return the rows that produce tokens."""
        ends = [(len(prompt), len(found)) for prompt, found in zip(self.prompts, self.generated, strict=True)]
        return [(sample, end - 1 + step) for sample, (end, count) in enumerate(ends) if step < count]


def record(
    shape: TinyGptShape | None = None, *, prompts: Sequence[str] = ("The sea ", "Rain on a roof"), tokens: int = 8
) -> Recording:
    """A run of the tiny model."""
    model = TinyGpt(shape or TinyGptShape())
    ids = [[ord(letter) - 32 for letter in prompt] for prompt in prompts]
    ids[0] += [FIRST_HALF, SECOND_HALF]
    temperature, seed = float(str(SAMPLING["temperature"])), int(str(SAMPLING["seed"]))
    found = [model.generate(id, tokens, temperature=temperature, seed=seed) for id in ids]
    sites = [model.forward(id + generated[:-1]) for id, generated in zip(ids, found, strict=True)]
    return Recording(shape=model.shape, prompts=ids, generated=found, sites=sites, capture=CAPTURE)


def text_of(token: int) -> str:
    """Text that a token ends; none of the first half of a character."""
    return "" if token == FIRST_HALF else "ü" if token == SECOND_HALF else chr(32 + token)


def offsets_of(ids: Sequence[int]) -> list[list[int] | None]:
    """Return the offset of each token's text, in UTF-16 units."""
    out: list[list[int] | None] = []
    end = 0
    for token in ids:
        begin, end = end, end + len(text_of(token))
        out.append([begin, end] if end > begin else None)
    return out


def run_state(recording: Recording, state: str) -> Frame:
    """RUN_STATE of rank 0."""
    prompts = [
        {"text": "".join(map(text_of, ids)), "ids": ids, "offsets": offsets_of(ids)} for ids in recording.prompts
    ]
    header = {
        "run": RUN,
        "state": state,
        "position": None,
        "prompts": prompts,
        "sampling": SAMPLING,
        "capture": recording.capture,
        "tokens": recording.steps,
        "error": None,
        "startedAt": 1_763_700_000.0,
        "tokensPerSecond": 20.0,
    }
    return Frame(FrameType.SCOPE_RUN_STATE, header)


def publisher(shape: TinyGptShape, rank: int, tp: int, pp: int) -> Frame:
    """PUBLISHER of one rank of a layout; ranks count tensor first."""
    stage, shard = divmod(rank, tp)
    header = {
        "rank": rank,
        "attempt": 0,
        "coordinates": {"tp": shard, "pp": stage, "dp": 0},
        "layers": _part(shape.layers, stage, pp),
        "heads": _part(shape.heads, shard, tp),
        "keyHeads": _key_heads(shape, shard, tp),
        "mlp": _part(shape.ffn, shard, tp),
        "sites": ["q", "k", "v", "attention", "mlp1", "mlp2", "residual"],
        "model": shape.model() if rank == 0 else None,
        "layout": {"tensor": tp, "pipeline": pp} if rank == 0 else None,
        "limits": {"prompts": 4, "tokens": 1 << 20} if rank == 0 else None,
    }
    return Frame(FrameType.SCOPE_PUBLISHER, header)


def _part(size: int, index: int, count: int) -> list[int]:
    return [size * index // count, size * (index + 1) // count]


def _key_heads(shape: TinyGptShape, shard: int, tp: int) -> list[int]:
    """More ranks than key heads: several hold the same one."""
    if tp <= shape.key_heads:
        return _part(shape.key_heads, shard, tp)
    head = shard * shape.key_heads // tp
    return [head, head + 1]


def pixels(vectors: Array, count: int) -> Array:
    """Means of `count` equal pieces of the last axis."""
    edges = [index * vectors.shape[-1] // count for index in range(count + 1)]
    means = [vectors[..., first:end].mean(axis=-1) for first, end in itertools.pairwise(edges)]
    return np.stack(means, axis=-1).astype("<f4")


@functools.lru_cache(maxsize=16)
def tables(recording: Recording, sample: int) -> dict[str, Array]:
    """Return what pages see of each row of a sample, before any code: the reference for all frames."""
    sites, shape = recording.sites[sample], recording.shape
    third, mlp = recording.capture["pixels"]["qkv"] // 3, recording.capture["pixels"]["mlp"]
    rows = len(sites["residual"])
    out = {name: pixels(sites[name].reshape(rows, shape.layers, -1), third) for name in "qkv"}
    out |= {name: pixels(sites[name], mlp) for name in ("mlp1", "mlp2")}
    out |= residual_measures(sites) | head_measures(sites["attention"])
    points = [basis.project(sites["residual"][:, place]) for place, basis in enumerate(fitted(recording))]
    return out | {"pca": np.stack(points, axis=1)}


def residual_measures(sites: dict[str, Array]) -> dict[str, Array]:
    after = sites["residual"].astype(np.float64)
    before = np.concatenate([sites["embedding"][:, None], after[:, :-1]], axis=1)
    norm = np.linalg.norm(after, axis=-1)
    change = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
    cosine = (after * before).sum(-1) / (norm * np.linalg.norm(before, axis=-1))
    found = {"residual.norm": norm, "residual.change": change, "residual.cosine": cosine}
    return {name: values.astype("<f4") for name, values in found.items()}


def head_measures(attention: Array) -> dict[str, Array]:
    """Measure every row and head: entropy over the logarithm of keys (0 with one key), largest, and that of key 0."""
    chances = attention.astype(np.float64).transpose(2, 0, 1, 3)
    keys = np.arange(1, len(chances) + 1)[:, None, None]
    logs = np.log(chances, out=np.zeros_like(chances), where=chances > 0)
    entropy = -(chances * logs).sum(-1) / np.maximum(np.log(keys), 1e-9)
    found = {"head.entropy": entropy, "head.max": chances.max(-1), "head.sink": chances[..., 0]}
    return {name: values.astype("<f4") for name, values in found.items()}


def codes_of(chances: Array) -> Array:
    """Encode an array with code u8s."""
    return np.asarray(np.rint(255 * np.sqrt(chances)), dtype=np.uint8)


def atlas(attention: Array, cells: int = 8) -> Array:
    """Max-pooled picture of every head, [layers, heads, 8, 8]; of short prompts cells without tokens are 0."""
    codes, rows = codes_of(attention), attention.shape[-1]
    edges = [index * rows // cells for index in range(cells + 1)]
    out = np.zeros((*codes.shape[:2], cells, cells), np.uint8)
    for y in range(cells):
        for x in range(cells):
            cell = codes[:, :, edges[y] : edges[y + 1], edges[x] : edges[x + 1]]
            out[:, :, y, x] = cell.max(axis=(2, 3), initial=0)
    return out


def tokens_frame(recording: Recording, step: int) -> Frame:
    """TOKENS of the rank that samples."""
    rows = recording.rows(step)
    logits = np.stack([recording.sites[s]["logits"][p] for s, p in rows]).astype(np.float64)
    ids = [recording.generated[sample][step] for sample, _ in rows]
    best, tensors = distributions(logits, ids, recording.capture["candidates"])
    places = [offsets_of(recording.prompts[s] + recording.generated[s][: step + 1])[-1] for s, _ in rows]
    ends = ["length" if step + 1 == len(recording.generated[sample]) else None for sample, _ in rows]
    text_header = {"ids": ids, "texts": list(map(text_of, ids)), "offsets": places, "finished": ends}
    header = {"run": RUN, "step": step, "rows": [list(row) for row in rows]}
    return build_frame(FrameType.SCOPE_TOKENS, header | text_header | {"topTexts": texts_alone(best)}, tensors)


def scores_frame(recording: Recording, ids: list[int], candidates: int) -> Frame:
    """TOKENS of a prompt of the recording, as rank 0 scores it."""
    logits = recording.sites[recording.prompts.index(ids)]["logits"][: len(ids) - 1].astype(np.float64)
    best, tensors = distributions(logits, ids[1:], candidates)
    header = {"rows": [[0, place] for place in range(len(ids) - 1)], "ids": ids[1:], "topTexts": texts_alone(best)}
    return build_frame(FrameType.SCOPE_TOKENS, header, tensors)


def texts_alone(best: Array) -> list[list[str]]:
    """Return the text of each candidate, decoded alone."""
    return [[text_of(int(token)) or "\ufffd" for token in row] for row in best]


def distributions(logits: Array, ids: list[int], candidates: int) -> tuple[Array, list[Tensor]]:
    """Return the candidates of each row, and the tensors that describe its distribution."""
    logs = logits - _logsumexp(logits)[:, None]
    best = np.argsort(-logs, axis=-1, kind="stable")[:, :candidates]
    partition = np.stack([_logsumexp(logits / t) for t in TEMPERATURES], axis=-1)
    return best, [
        Tensor("top.id", "u32", best.astype("<u4")),
        Tensor("top.p", "f16", np.exp(np.take_along_axis(logs, best, -1)).astype("<f2")),
        Tensor("top.logit", "f32", np.take_along_axis(logits, best, -1).astype("<f4")),
        Tensor("partition", "f32", partition.astype("<f4")),
        Tensor("surprise", "f32", -logs[np.arange(len(ids)), ids].astype("<f4")),
        Tensor("entropy", "f32", -(np.exp(logs) * logs).sum(-1).astype("<f4")),
    ]


def _logsumexp(values: Array) -> Array:
    top = values.max(axis=-1)
    return np.asarray(top + np.log(np.exp(values - top[..., None]).sum(-1)))


def part(
    recording: Recording,
    step: int,
    rank: int,
    *,
    tp: int = 1,
    pp: int = 1,
    sequence_parallel: bool = False,
    with_pca: bool = False,
) -> Iterator[Frame]:
    """Yield PART frames of one rank for a step; under sequence parallel replicated tensors are in a separate frame."""
    requested = (
        [(sample, place) for sample, ids in enumerate(recording.prompts) for place in range(len(ids))]
        if step == 0
        else recording.rows(step)
    )
    _, shard = divmod(rank, tp)
    made = _Part(recording, step, rank, tp, pp, with_pca)
    parts: list[tuple[Sequence[tuple[int, int]], list[Tensor]]]
    if not sequence_parallel:
        parts = [(requested, [*made.sharded(requested), *made.whole(requested)])]
    else:
        own = requested[slice(*_part(len(requested), shard, tp))]
        parts = [(own, made.whole(own)), (requested, made.sharded(requested))]
    parts += made.prefill() if step == 0 else []
    for number, (rows, tensors) in enumerate(parts):
        yield made.frame(rows, tensors, number=number, more=number < len(parts) - 1)


@dataclasses.dataclass(frozen=True)
class _Part:
    recording: Recording
    step: int
    rank: int
    tp: int
    pp: int
    with_pca: bool

    @property
    def layers(self) -> list[int]:
        return list(range(*_part(self.recording.shape.layers, self.rank // self.tp, self.pp)))

    @property
    def heads(self) -> list[int]:
        return _part(self.recording.shape.heads, self.rank % self.tp, self.tp)

    def frame(self, rows: Sequence[tuple[int, int]], tensors: Sequence[Tensor], *, number: int, more: bool) -> Frame:
        ranges = [[sample, place, 1] for sample, place in rows]
        header = {"rank": self.rank, "run": RUN, "step": self.step, "rows": ranges, "timeUs": 0}
        header |= {"part": number, "more": more}
        header |= {"pcaVersion": VERSION} if any(tensor.name == "pca" for tensor in tensors) else {}
        return build_frame(FrameType.SCOPE_PART, header, tensors)

    def table(self, name: str, rows: Sequence[tuple[int, int]]) -> Array:
        found = [tables(self.recording, sample) for sample in range(len(self.recording.prompts))]
        if not rows:
            return np.zeros((0, *found[0][name][:, self.layers].shape[1:]), "<f4")
        return np.stack([found[sample][name][place, self.layers] for sample, place in rows]).astype("<f4")

    def _header(self, site: str, **more: Any) -> dict[str, Any]:
        return {"site": site, "layers": self.layers, "replicated": False} | more

    def sharded(self, rows: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Pixels of q, k, v and fc1, measures of heads, rows of pinned heads."""
        shape, shard = self.recording.shape, self.rank % self.tp
        keys = _key_heads(shape, shard, self.tp)
        spans = {
            "q": ("heads", self.heads, shape.heads),
            "mlp1": ("features", _part(shape.ffn, shard, self.tp), shape.ffn),
        }
        spans |= {name: ("heads", keys, shape.key_heads) for name in "kv"}
        spans |= {name: ("heads", self.heads, shape.heads) for name in ("head.entropy", "head.max", "head.sink")}
        out = []
        for name, (kind, span, size) in spans.items():
            whole = self.table(name, rows)
            first, end = (edge * whole.shape[-1] // size for edge in span)
            out.append(Tensor(name, "f32", whole[..., first:end].copy(), None, self._header(name, **{kind: span})))
        return out + (self.attention(rows) if self.step else [])

    def whole(self, rows: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the tensors that every tensor rank holds whole."""
        names = ["mlp2", "residual.norm", "residual.change", "residual.cosine", *(["pca"] if self.with_pca else [])]
        return [
            Tensor(name, "f32", self.table(name, rows), None, self._header(name, replicated=True)) for name in names
        ]

    def attention(self, rows: Sequence[tuple[int, int]]) -> list[Tensor]:
        keys = max(place for _, place in rows) + 1
        out = []
        for pin in self.recording.capture["pinned"]:
            layer, head = pin["layer"], pin["head"]
            if layer not in self.layers or head not in range(*self.heads):
                continue
            data = np.zeros((len(rows), 1, 1, keys), np.uint8)
            for index, (sample, place) in enumerate(rows):
                row = self.recording.sites[sample]["attention"][layer, head, place, : place + 1]
                data[index, 0, 0, : place + 1] = codes_of(row)
            header = {"site": "attention", "layers": [layer], "heads": [head, head + 1], "replicated": False}
            out.append(Tensor("attention", "u8s", data, None, header))
        return out

    def prefill(self) -> Iterator[tuple[Sequence[tuple[int, int]], list[Tensor]]]:
        """Pictures of heads, and rows of pinned ones, of each prompt."""
        for sample, ids in enumerate(self.recording.prompts):
            count = len(ids)
            found = self.recording.sites[sample]["attention"][self.layers][:, slice(*self.heads), :count, :count]
            picture = Tensor("atlas", "u8s", atlas(found), None, self._header("attention", heads=self.heads))
            rows = [(sample, place) for place in range(count)]
            yield rows, [picture, *self.attention(rows)]


@functools.lru_cache(maxsize=16)
def fitted(recording: Recording) -> list[pca.PcaBasis]:
    """The basis of the first prompt."""
    residual = recording.sites[0]["residual"][: len(recording.prompts[0])]
    return [pca.fit(residual[:, layer]) for layer in range(recording.shape.layers)]


def rank_frames(
    recording: Recording, *, tp: int = 1, pp: int = 1, sequence_parallel: bool = False, with_pca: bool = True
) -> Iterator[tuple[int, Frame]]:
    """All that the ranks of a layout send, in an order that may happen."""
    for rank in range(tp * pp):
        yield rank, publisher(recording.shape, rank, tp, pp)
    for state in ("queued", "prefill"):
        yield 0, run_state(recording, state)
    for step in range(recording.steps):
        how: dict[str, Any] = {"tp": tp, "pp": pp, "sequence_parallel": sequence_parallel}
        for rank in range(tp * pp):
            for frame in part(recording, step, rank, with_pca=with_pca and step > 0, **how):
                yield rank, frame
        yield tp * (pp - 1), tokens_frame(recording, step)
        if step == 0:
            yield 0, run_state(recording, "decoding")
    yield 0, run_state(recording, "done")


def pca_frame(recording: Recording) -> Frame:
    """SCOPE_PCA of the basis of the first prompt, with the coordinates of all prompts."""
    bases = fitted(recording)
    rows = [(sample, place) for sample, ids in enumerate(recording.prompts) for place in range(len(ids))]
    residual = np.stack([recording.sites[sample]["residual"][place] for sample, place in rows])
    points = np.stack([basis.project(residual[:, layer]) for layer, basis in enumerate(bases)], axis=1)
    header = {
        "run": RUN,
        "version": VERSION,
        "layers": list(range(len(bases))),
        "explained": [basis.explained.tolist() for basis in bases],
        "fitted": "first prompt",
        "sources": [{"run": RUN, "tokens": len(recording.prompts[0])}] * len(bases),
        "rows": [list(row) for row in rows],
    }
    return build_frame(FrameType.SCOPE_PCA, header, [Tensor("pca", "f32", points.astype("<f4"))])


def core_of(recording: Recording, **layout: Any) -> ScopeCore:
    """A hub's core that has seen the whole run, and every exact number of it."""
    core = ScopeCore(ScopeSettings(job="tiny"))
    for rank, frame in rank_frames(recording, **layout):
        core.ingest.take_frame(0, rank, frame)
        if frame.type == FrameType.SCOPE_TOKENS and frame.header["step"] == 0:
            core.feed.publish_frame(core.runs[RUN], pca_frame(recording))
            core.pca.newest = core.runs[RUN].pca_version = VERSION
    for sample, sites in enumerate(recording.sites):
        put_values(core, sample, sites)
    return core


def put_values(core: ScopeCore, sample: int, sites: dict[str, Array]) -> None:
    """Every exact number of a sample."""
    values = core.runs[RUN].values
    for site, found in sites.items():
        rows = found.transpose(2, 0, 1, 3) if site == "attention" else found
        positions = range(len(rows))
        if site in {"embedding", "final_norm", "logits"}:
            values.put((site, sample, None, None), positions, rows)
            continue
        for layer in range(rows.shape[1]):
            if rows.ndim == 3:
                values.put((site, sample, layer, None), positions, rows[:, layer])
            else:
                for head in range(rows.shape[2]):
                    values.put((site, sample, layer, head), positions, rows[:, layer, head])


def session(recording: Recording | None = None) -> bytes:
    """The recorded session of a run, as a file of section 9 holds it."""
    return session_file.dump(core_of(recording or record()).feed, RUN)


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_bytes(session())
