"""A served model of a chosen size with its hub, and pages of it: for the measurements of MegaScope."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import websockets.sync.client
from websockets.typing import Subprotocol

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"
sys.path[:0] = [str(SUPPORT), str(SUPPORT / "training")]
from served_job import Served, served  # noqa: E402 - tests are no package

from megatronapp_common import frames  # noqa: E402
from megatronapp_common.frames import Frame, FrameType  # noqa: E402
from megatronapp_common.scope.protocol import SUBPROTOCOL  # noqa: E402

ENDED = frozenset({"done", "cancelled", "failed"})
ROUTE = "/api/v1/scope"
WRITE = """
# No token ends a text: runs are as long as they were asked for.
import sys
from megatronapp_trainer.data.tokenizer import train
from megatronapp_trainer.pretrain import main
texts = ["hello world, this is a small text about whales and ships. " * 20, "né à Paris, 日本語 " * 10]
whole = train(texts, 300).backend.to_str().replace("<|endoftext|>", "<|nothing|>")
open(sys.argv[1] + "/tokenizer.json", "w").write(whole)
raise SystemExit(main([*sys.argv[2:], "--save", sys.argv[1] + "/saved"]))
"""
DEADLINE_S = 900.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT with learned positions; the width of a head only decides how long a CPU needs."""

    layers: int
    heads: int
    head_width: int
    positions: int

    @property
    def flags(self) -> list[str]:
        """Flags for one step of training on random tokens, which writes a checkpoint."""
        shape = f"--num-layers {self.layers} --num-attention-heads {self.heads}"
        wide = f"--hidden-size {self.heads * self.head_width} --max-position-embeddings {self.positions}"
        steps = "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 0.001 --eval-iters 0 --mock-data"
        return f"{shape} {wide} {steps} --vocab-size 300 --init-method-std 0.2".split()


def write_model(folder: pathlib.Path, size: Size) -> None:
    """A checkpoint of random weights, with a tokenizer."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITE, str(folder), *size.flags], env=environment, check=True)


def prompt_of(folder: pathlib.Path, tokens: int) -> str:
    """A text of this many tokens, or a few more."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    sentence = "hello world, this is a small text about whales and ships. "
    text = sentence
    while len(tokenizer.encode(text).ids) < tokens:
        text += sentence
    while len(tokenizer.encode(text[:-1]).ids) >= tokens:
        text = text[:-1]
    return text


@contextlib.contextmanager
def serving(folder: pathlib.Path, size: Size, *arguments: str) -> Iterator[Served]:
    """Run `megatronapp serve` of a model in `folder` and wait until it takes requests. SIGTERM removes everything."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    write_model(folder, size)
    with served(folder, folder, "bench", *arguments) as job:
        job.until_phase("Running", 0)
        with job.hub() as hub:
            while hub.get("scope").json()["state"] != "ready":
                time.sleep(0.2)
        yield job


class Page:
    """A page with the role of the client. `queue`: messages that wait on this side; a deaf one has no socket."""

    def __init__(self, client: httpx.Client, *, queue: int = 16, deaf: bool = False) -> None:
        self._client = client
        self._stack = contextlib.ExitStack()
        if deaf:
            return
        self.socket = self._stack.enter_context(
            websockets.sync.client.connect(
                str(client.base_url).rstrip("/").replace("http", "ws", 1) + "/scope",
                additional_headers={"Authorization": client.headers["Authorization"]},
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                compression=None,
                max_size=None,
                max_queue=queue,
                proxy=None,
            )
        )

    def close(self) -> None:
        """Close the page's socket."""
        self._stack.close()

    def start_run(self, request: dict[str, Any]) -> str:
        """Start a run; its id."""
        answer = self._client.post("scope/runs", json=request)
        if answer.status_code != 201:
            raise RuntimeError(answer.text)
        return str(answer.json()["run"])

    def detail(self, run: str) -> dict[str, Any]:
        """Return the hub's entry of a run."""
        found: dict[str, Any] = self._client.get(f"scope/runs/{run}").raise_for_status().json()
        return found

    def until_end(self, run: str) -> Iterator[tuple[Frame, int]]:
        """Yield frames and their bytes on the socket, up to the one with the end of a run."""
        while True:
            message = self.socket.recv(timeout=DEADLINE_S)
            assert isinstance(message, bytes)
            self.socket.send(json.dumps({"type": "credit", "bytes": len(message)}))
            frame = frames.decode(message)
            yield frame, len(message)
            is_state = frame.type == FrameType.SCOPE_RUN and frame.header["run"] == run
            if is_state and frame.header["state"] in ENDED:
                return

    def wait_for_end(self, run: str) -> dict[str, Any]:
        """Return the header with the end of a run, without this page's reading anything."""
        while (found := self.detail(run))["state"] not in ENDED:
            time.sleep(0.2)
        return found


@functools.cache
def host() -> str:
    """Describe the machine of this run."""
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores, {name}, load {os.getloadavg()[0]:.1f}"
