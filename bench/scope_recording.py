"""A recorded session of any size for measurements of the page: frames as a hub makes them, of drawn numbers.

What a page does with a frame depends on sizes, not on values; so nothing of that size has to be computed.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support" / "scope"))
from scope_session import RUN, codes_of

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import TEMPERATURES, Tensor, build_frame
from megatronapp_common.scope.protocol_requests import CaptureSettings

Head = tuple[int, int]
Array = NDArray[Any]
FRACTION_SITES = ("head.entropy", "head.max", "head.sink")
MEASURES = ("residual.norm", "residual.change", "residual.cosine")
STATES = {"q": 32, "k": 32, "v": 32, "mlp1": 64, "mlp2": 64}
"""Pixels of each."""
CANDIDATES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Content of a recording: one prompt, then one token a step."""

    layers: int = 32
    heads: int = 32
    prompt: int = 1024
    steps: int = 2
    tokens_per_second: float = 50.0
    pinned: Sequence[Head] = ()
    """Heads whose rows are in every step."""
    prompt_heads: Sequence[Head] = ()
    """Heads whose attention over the prompt the session holds."""

    @property
    def model(self) -> dict[str, Any]:
        """Description of the model as in SCOPE_HELLO."""
        widths = {"hidden": 4096, "headWidth": 4096 // self.heads, "mlpWidth": 16384, "vocabulary": 50257}
        return {
            "layers": self.layers,
            "heads": self.heads,
            "keyHeads": self.heads,
            **widths,
            "gated": False,
            "positions": "learned",
            "maxLength": 8192,
        }


def session(drawn: Drawn) -> bytes:
    """Return the content of a session file."""
    core = ScopeCore(ScopeSettings(job="drawn"))
    for frame in _sent(drawn):
        core.ingest.take_frame(0, 0, frame)
    if core.ingest.rejected.count:
        raise RuntimeError("the hub does not take what is drawn here: it has other frames now")
    source = np.random.default_rng(7)
    for layer, head in drawn.prompt_heads:
        for position, row in enumerate(_attention(drawn.prompt, source)):
            core.runs[RUN].attention.put((0, layer, head), [position], row[None, : position + 1].copy())
    return session_file.dump(core.feed, RUN)


def _attention(rows: int, source: np.random.Generator) -> Array:
    """Return codes of a head with attention to near tokens, and more to some others."""
    distance = np.arange(rows)[:, None] - np.arange(rows)
    scores = np.where(distance >= 0, source.normal(size=(rows, rows)) * 2 - distance / 60, -np.inf)
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    return codes_of(chances / chances.sum(axis=1, keepdims=True))


def _sent(drawn: Drawn) -> Iterator[Frame]:
    coordinates = {"tp": 0, "pp": 0, "dp": 0}
    publisher = {"rank": 0, "attempt": 0, "coordinates": coordinates, "sites": [], "model": drawn.model}
    yield Frame(FrameType.SCOPE_PUBLISHER, publisher)
    yield _state(drawn, "prefill")
    source = np.random.default_rng(5)
    for step in range(drawn.steps):
        every = max(1, drawn.prompt // 16)
        last = drawn.prompt - 1 + step
        positions = [*range(0, drawn.prompt - 1, every), last] if step == 0 else [last]
        yield _part(drawn, step, positions, source)
        yield _tokens(drawn, step, source)
        if step == 0:
            yield _state(drawn, "decoding")
    yield _state(drawn, "done")


def _state(drawn: Drawn, state: str) -> Frame:
    pinned = [{"layer": layer, "head": head} for layer, head in drawn.pinned]
    capture = CaptureSettings.model_validate({"pinned": pinned}).model_dump(mode="json", by_alias=True)
    offsets = [[place, place + 1] for place in range(drawn.prompt)]
    prompt = {"text": "a" * drawn.prompt, "ids": list(range(drawn.prompt)), "offsets": offsets}
    header: dict[str, Any] = {"run": RUN, "state": state, "position": None, "prompts": [prompt], "capture": capture}
    header |= {"tokens": drawn.steps, "error": None, "startedAt": 0.0, "tokensPerSecond": drawn.tokens_per_second}
    return Frame(FrameType.SCOPE_RUN_STATE, header)


def _part(drawn: Drawn, step: int, positions: Sequence[int], source: np.random.Generator) -> Frame:
    part_header = {"layers": list(range(drawn.layers)), "replicated": False}
    shape = (len(positions), drawn.layers)
    tensors = [
        Tensor(name, "f32", source.normal(size=(*shape, width)).astype("<f4"), None, {"site": name, **part_header})
        for name, width in STATES.items()
    ]
    tensors += [
        Tensor(
            name, "f32", source.random((*shape, drawn.heads)).astype("<f4"), None, {"site": "attention", **part_header}
        )
        for name in FRACTION_SITES
    ]
    tensors += [
        Tensor(name, "f32", source.random(shape).astype("<f4"), None, {"site": "residual", **part_header})
        for name in MEASURES
    ]
    if step == 0:
        cells = source.integers(0, 256, (drawn.layers, drawn.heads, 8, 8), np.uint8)
        picture = {"site": "attention", "heads": [0, drawn.heads], **part_header}
        rest = [Tensor("atlas", "u8s", cells, None, picture)]
    else:
        rest = [_row(pin, positions[0], source) for pin in drawn.pinned]
    header = {"rank": 0, "run": RUN, "step": step, "rows": [[0, place, 1] for place in positions], "timeUs": 0}
    return build_frame(FrameType.SCOPE_PART, header, tensors + rest)


def _row(pin: Head, position: int, source: np.random.Generator) -> Tensor:
    layer, head = pin
    tensor_header = {"site": "attention", "layers": [layer], "heads": [head, head + 1], "replicated": False}
    return Tensor("attention", "u8s", source.integers(0, 64, (1, 1, 1, position + 1), np.uint8), None, tensor_header)


def _tokens(drawn: Drawn, step: int, source: np.random.Generator) -> Frame:
    chances = np.sort(source.random((1, CANDIDATES)))[:, ::-1] / CANDIDATES
    tensors = [
        Tensor("top.id", "u32", np.arange(CANDIDATES, dtype="<u4")[None]),
        Tensor("top.p", "f16", chances.astype("<f2")),
        Tensor("top.logit", "f32", np.log(chances).astype("<f4")),
        Tensor("partition", "f32", source.random((1, len(TEMPERATURES))).astype("<f4")),
        Tensor("surprise", "f32", source.random(1).astype("<f4")),
        Tensor("entropy", "f32", source.random(1).astype("<f4")),
    ]
    end = drawn.prompt + 6 * step
    text_header = {"ids": [step % 50257], "texts": [f" w{step:04}"], "offsets": [[end, end + 6]]}
    text_header |= {"finished": ["length" if step == drawn.steps - 1 else None]}
    text_header |= {"topTexts": [[f" c{place}" for place in range(CANDIDATES)]]}
    header = {"run": RUN, "step": step, "rows": [[0, drawn.prompt - 1 + step]]}
    return build_frame(FrameType.SCOPE_TOKENS, header | text_header, tensors)
