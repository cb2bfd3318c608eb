"""Bytes of a token on the wire at 32 layers of 32 heads and 2,048 tokens, through the hub's own encoder."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import MAX_MESSAGE_BYTES, Tensor, build_frame
from megatronapp_common.scope.protocol_requests import CaptureSettings

LAYERS, HEADS, LENGTH, STEPS = 32, 32, 2048, 3
RUN = "0123456789ab"
MODEL = {
    "layers": LAYERS,
    "hidden": 4096,
    "heads": HEADS,
    "keyHeads": 8,
    "headWidth": 128,
    "mlpWidth": 14336,
    "gated": True,
    "vocabulary": 128256,
    "positions": "rotary",
    "maxLength": 8192,
}
RANDOM = np.random.default_rng(5)
PINNED = [(layer, 7) for layer in range(0, 32, 4)]
PIXELS = {"q": 32, "k": 32, "v": 32, "mlp1": 64, "mlp2": 64}
MEASURES = ("residual.norm", "residual.change", "residual.cosine")
FRACTION_SITES = ("head.entropy", "head.max", "head.sink")
PRESETS: dict[str, dict[str, object]] = {
    "default": {"preset": "default", "pinned": [{"layer": p, "head": h} for p, h in PINNED]},
    "lite": {"preset": "lite"},
}


def part(step: int, positions: list[int], preset: str) -> Frame:
    layers: dict[str, Any] = {"layers": list(range(LAYERS)), "replicated": False}
    count = len(positions)

    def tensor(name: str, *width: int) -> Tensor:
        values = RANDOM.normal(size=(count, LAYERS, *width)).astype("<f4")
        return Tensor(name, "f32", values, None, {"site": name, **layers})

    sizes: dict[str, tuple[int, ...]] = {
        name: (width,) for name, width in PIXELS.items() if preset == "default" or name != "mlp1"
    }
    sizes |= {name: (HEADS,) for name in FRACTION_SITES} | {"pca": (8,)} | dict.fromkeys(MEASURES, ())
    tensors = [tensor(name, *width) for name, width in sizes.items()]
    if step == 0:
        atlas = RANDOM.integers(0, 256, (LAYERS, HEADS, 8, 8), np.uint8)
        tensors.append(Tensor("atlas", "u8s", atlas, None, {"site": "attention", **layers, "heads": [0, HEADS]}))
    elif preset == "default":
        for layer, head in PINNED:
            row = RANDOM.integers(0, 256, (1, 1, 1, positions[0] + 1), np.uint8)
            tensor_header = {"site": "attention", "layers": [layer], "heads": [head, head + 1], "replicated": False}
            tensors.append(Tensor("attention", "u8s", row, None, tensor_header))
    rows = [[0, position, 1] for position in positions]
    return build_frame(FrameType.SCOPE_PART, {"rank": 0, "run": RUN, "step": step, "rows": rows}, tensors)


def tokens(step: int) -> Frame:
    kinds = {"top.id": ("<u4", 20), "top.p": ("<f2", 20), "top.logit": ("<f4", 20), "partition": ("<f4", 9)}
    codes = {"<u4": "u32", "<f2": "f16", "<f4": "f32"}
    tensors = [Tensor(name, codes[kind], np.ones((1, width), kind)) for name, (kind, width) in kinds.items()]
    tensors += [Tensor(name, "f32", np.ones(1, "<f4")) for name in ("surprise", "entropy")]
    text_header = {"ids": [128_000], "texts": [" antidisestablishment"], "offsets": [[9000, 9021]], "finished": [None]}
    header = {"run": RUN, "step": step, "rows": [[0, LENGTH - 1 + step]]}
    return build_frame(FrameType.SCOPE_TOKENS, header | text_header, tensors)


def sent(preset: str) -> Iterator[Frame]:
    publisher = {"rank": 0, "attempt": 0, "coordinates": {"tp": 0, "pp": 0, "dp": 0}, "sites": [], "model": MODEL}
    yield Frame(FrameType.SCOPE_PUBLISHER, publisher)
    capture = CaptureSettings.model_validate(PRESETS[preset]).model_dump(mode="json", by_alias=True)
    prompts = [{"text": "", "ids": list(range(LENGTH)), "offsets": [[n, n + 1] for n in range(LENGTH)]}]
    yield Frame(FrameType.SCOPE_RUN_STATE, {"run": RUN, "state": "decoding", "prompts": prompts, "capture": capture})
    for step in range(STEPS):
        positions = [*range(0, LENGTH, 128), LENGTH - 1] if step == 0 else [LENGTH - 1 + step]
        yield part(step, positions, preset)
        yield tokens(step)


@pytest.mark.parametrize(("preset", "limit"), [("default", 32 << 10), ("lite", 12 << 10)])
def test_a_token_stays_within_its_bytes(preset: str, limit: int) -> None:
    core = ScopeCore(ScopeSettings(job="large"))
    for frame in sent(preset):
        core.ingest.take_frame(0, 0, frame)
    assert core.ingest.rejected.count == 0
    entries = list(core.runs[RUN].journal.after(0))
    per_step = [
        sum(len(entry.whole or b"") for entry in entries if entry.step == step and entry.type in {42, 44})
        for step in range(1, STEPS)
    ]
    assert limit // 2 < max(per_step) <= limit, per_step
    overviews = [len(entry.whole or b"") for entry in entries if entry.type == FrameType.SCOPE_OVERVIEW]
    assert len(overviews) == 1 and 128 << 10 < overviews[0] <= MAX_MESSAGE_BYTES
    assert max(len(entry.whole or b"") for entry in entries) <= MAX_MESSAGE_BYTES
    print(f"{preset}: {max(per_step)} bytes a token, {overviews[0]} a prompt")
