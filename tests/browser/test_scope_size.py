"""MegaScope's screen stays small while thousands of tokens are received: nodes, memory, pictures."""

from typing import Any

import numpy as np
import playwright.sync_api as pw
import pytest
import scope_session

from megatronapp_common.frames import FrameType, encode
from megatronapp_common.scope.protocol import Tensor, build_frame

pytestmark = pytest.mark.browser
RUN = scope_session.RUN
LAYERS = HEADS = 32
TOKENS = 5000
BATCH = 250
MAX_GROWTH = 64 << 20
MODEL = {
    "layers": LAYERS, "hidden": 4096, "heads": HEADS, "keyHeads": HEADS, "headWidth": 128, "mlpWidth": 16384,
    "gated": False, "vocabulary": 50257, "positions": "learned", "maxLength": 8192,
}  # fmt: skip
HELLO = {
    "protocol": 1, "role": "viewer", "job": "large", "source": "live", "state": "ready", "model": MODEL,
    "layout": {"tensor": 4, "pipeline": 4}, "presets": ["default", "lite", "off"], "reducers": [],
    "limits": {"prompts": 8, "tokens": 512, "pinnedHeads": 64, "ringBytes": 1 << 26, "expressionLength": 256},
    "runs": [{"run": RUN, "state": "decoding", "prompts": ["a"], "position": None}],
}  # fmt: skip
RUN_HEADER = {
    "run": RUN, "seq": 1, "state": "decoding", "tokens": TOKENS, "error": None,
    "prompts": [{"text": "a", "ids": [1], "offsets": [[0, 1]]}],
}  # fmt: skip


def tensors(generator: np.random.Generator) -> list[Tensor]:
    """Return what a step carries by default at 32 layers of 32 heads, without the pixels of the MLP."""
    q = [
        Tensor(name, "i8", generator.integers(-126, 127, (1, LAYERS, 32), np.int8), np.ones((1, LAYERS), np.float32))
        for name in "qkv"
    ]
    heads = [
        Tensor(f"head.{name}", "u8", generator.integers(0, 255, (1, LAYERS, HEADS), np.uint8))
        for name in ("entropy", "max", "sink")
    ]
    norm = Tensor("residual.norm", "f16", generator.random((1, LAYERS)).astype(np.float16))
    surprise = Tensor("surprise", "f32", generator.random(1, np.float32))
    return [*q, *heads, norm, surprise]


def step(number: int, carried: list[Tensor]) -> bytes:
    header = {
        "run": RUN, "seq": number + 2, "step": number, "rows": [[0, number]], "ids": [number % 50257],
        "texts": [f" w{number % 97}"], "offsets": [None], "finished": [None],
    }  # fmt: skip
    return encode(build_frame(FrameType.SCOPE_STEP, header, carried))


def heap(page: pw.Page) -> float:
    """Bytes that scripts hold after a collection, typed arrays too."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    usage = session.send("Runtime.getHeapUsage")
    return float(usage["usedSize"]) + float(usage.get("backingStorageSize", 0))


@pytest.fixture
def opened(own_page: pw.Page, tmp_path: Any) -> Any:
    """The page over a replay's address, with a socket that the test writes to itself."""
    sockets: list[pw.WebSocketRoute] = []
    own_page.route("**/api/v1/scope", lambda route: route.fulfill(json=HELLO))
    own_page.route("**/attention/**", lambda route: route.fulfill(status=404, json={"message": "none", "hint": ""}))

    def serve(socket: pw.WebSocketRoute) -> None:
        sockets.append(socket)
        socket.send(encode(build_frame(FrameType.SCOPE_HELLO, HELLO)))
        socket.send(encode(build_frame(FrameType.SCOPE_RUN, RUN_HEADER)))

    own_page.route_web_socket("**/api/v1/scope", serve)
    return sockets


@pytest.mark.full("half a minute of a page that is sent thousands of tokens")
def test_thousands_of_tokens_leave_nodes_and_memory_small(own_page: pw.Page, opened: Any, healthy_stack: Any) -> None:
    own_page.goto(healthy_stack.entry)
    pw.expect(own_page.get_by_role("button", name="Open MegaScope")).to_be_visible()
    own_page.get_by_role("button", name="Open MegaScope").click()
    pw.expect(own_page.get_by_test_id("tokens")).to_be_visible()
    own_page.keyboard.press("2")
    place = own_page.get_by_test_id("token-place")
    carried = tensors(np.random.default_rng(5))
    before = None
    for first in range(0, TOKENS, BATCH):
        for number in range(first, first + BATCH):
            opened[-1].send(step(number, carried))
        pw.expect(place).to_have_text(f"{first + BATCH} of {first + BATCH}")
        before = heap(own_page) if before is None else before
    assert before is not None
    assert heap(own_page) - before <= MAX_GROWTH
    assert own_page.evaluate("document.querySelectorAll('*').length") <= 3000
    pw.expect(own_page.get_by_test_id("head-atlas")).to_be_visible()
    pw.expect(own_page.get_by_test_id("why-not")).to_contain_text("controller role")
