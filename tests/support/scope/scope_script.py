"""Frames of a run with a long prompt and six candidates, which a test sends to the page as a hub would."""

from typing import Any

import numpy as np
import scope_session

from megatronapp_common.frames import FrameType, encode
from megatronapp_common.scope.protocol import TEMPERATURES, Tensor, build_frame

RUN = scope_session.RUN
TEXT = "abcdefghijklmnopqrst"
STRIDE = 4
REPORTED_STEPS = [0, 4, 8, 12, 16, 19]
LAYERS = 2
LOGITS = np.array([3, 2, 1, 0, -1, -2, -3, -4, -5, -6])
"""Logits of the whole vocabulary; the first six are candidates."""
SAMPLING = {"temperature": 0.5, "topK": 0, "topP": 0.9, "seed": 1, "stop": []}
HELLO: dict[str, Any] = {
    "protocol": 1, "role": "controller", "job": "long", "source": "live", "state": "ready",
    "model": {"layers": LAYERS, "hidden": 8, "heads": 2, "keyHeads": 2, "headWidth": 4, "mlpWidth": 8, "gated": False,
              "vocabulary": len(LOGITS), "positions": "rotary", "maxLength": 64},
    "layout": {"tensor": 1, "pipeline": 1}, "presets": ["default", "lite", "off"], "reducers": [],
    "limits": {"prompts": 8, "tokens": 64, "pinnedHeads": 8, "ringBytes": 1 << 20, "expressionLength": 256},
    "runs": [{"run": RUN, "state": "decoding", "prompts": [TEXT], "position": None}],
}  # fmt: skip
RUN_HEADER: dict[str, Any] = {
    "run": RUN, "seq": 1, "state": "decoding", "tokens": 4, "error": None, "sampling": SAMPLING,
    "prompts": [{"text": TEXT, "ids": list(range(20)), "offsets": [[at, at + 1] for at in range(20)]}],
}  # fmt: skip


def overview() -> bytes:
    """Numbers of every fourth token of the prompt: each is its own position."""
    rows = np.repeat(np.array(REPORTED_STEPS, np.float32), LAYERS * 3).reshape(-1, LAYERS, 3)
    scales = np.ones((len(REPORTED_STEPS), LAYERS), np.float32)
    tensors = [
        Tensor("q", "i8", rows.astype(np.int8), scales),
        Tensor("residual.norm", "f16", rows[..., 0].astype(np.float16)),
        Tensor("head.entropy", "u8", np.repeat(np.array(REPORTED_STEPS, np.uint8), 4).reshape(-1, LAYERS, 2)),
    ]
    header = {"run": RUN, "seq": 2, "sample": 0, "stride": STRIDE, "positions": REPORTED_STEPS}
    return encode(build_frame(FrameType.SCOPE_OVERVIEW, header, tensors))


def first_step() -> bytes:
    """The first token that was generated, with six candidates."""
    logits = LOGITS[:6].astype(np.float32)[None]
    partition = np.array([[np.log(np.exp(LOGITS / t).sum()) for t in TEMPERATURES]], np.float32)
    tensors = [
        Tensor("top.id", "u32", np.arange(6, dtype=np.uint32)[None]),
        Tensor("top.p", "f16", np.exp(logits - partition[:, [5]]).astype(np.float16)),
        Tensor("top.logit", "f32", logits),
        Tensor("partition", "f32", partition),
        Tensor("surprise", "f32", np.array([0.5], np.float32)),
        Tensor("entropy", "f32", np.array([1.5], np.float32)),
    ]
    header = {
        "run": RUN, "seq": 3, "step": 0, "rows": [[0, 19]], "ids": [0], "texts": [" the"], "offsets": [None],
        "finished": [None], "topTexts": [[" the", " a", "\ufffd", "x", "y", "z"]],
    }  # fmt: skip
    return encode(build_frame(FrameType.SCOPE_STEP, header, tensors))


def hello(**change: Any) -> bytes:
    return encode(build_frame(FrameType.SCOPE_HELLO, HELLO | change))


def run_frame(**change: Any) -> bytes:
    return encode(build_frame(FrameType.SCOPE_RUN, RUN_HEADER | change))
