"""Order of events when rank 0 reports to its agent: from then on a run is accepted and captured, so a page may offer
it."""

import concurrent.futures
import os
import pathlib
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

import httpx
import pytest
from served_model import write_model

from megatronapp_common.frames import Frame, FrameType, decode, frame_length
from megatronapp_common.names import Env
from megatronapp_common.scope.protocol import SOCKET
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.serve.rank_main import ADDRESS_FILE, main

pytestmark = pytest.mark.torch
TIME_TO_PUBLISH_S = 0.5
"""Seconds after the model is ready and before the server is; a message that follows rank 0's report is answered in
them."""
RUN_REQUEST = {"prompts": ["hello"], "tokens": 2, "sampling": {"temperature": 0}}


def next_frame(stream: BinaryIO) -> Frame:
    head = stream.read(16)
    return decode(head + stream.read(frame_length(head) - 16))


def start_run_at_once(
    folder: pathlib.Path, listener: socket.socket, rank_published: threading.Event
) -> tuple[int, set[int]]:
    """Request a run faster than a page can: return the answer, and the kinds of frames that follow."""
    try:
        with listener.accept()[0] as peer, peer.makefile("rb") as stream:
            assert next_frame(stream).type == FrameType.SCOPE_PUBLISHER
            rank_published.set()
            url = (folder / ADDRESS_FILE).read_text().strip()
            status = httpx.post(f"{url}/scope/v1/runs", json=RUN_REQUEST, trust_env=False, timeout=240).status_code
            found: set[int] = set()
            while status == 201 and not {FrameType.SCOPE_PART, FrameType.SCOPE_TOKENS} <= found:
                found.add(next_frame(stream).type)
            return status, found
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def serve_and_start_run(model: str) -> tuple[int, set[int]]:
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor() as pool:
        folder = pathlib.Path(name)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{SOCKET}")
            listener.listen()
            os.environ |= {Env.RUN_DIR: name, Env.HUB_URL: "http://127.0.0.1:9", Env.ATTEMPT: "0"}
            started = pool.submit(start_run_at_once, folder, listener, rank_published := threading.Event())
            warm_up = Engine.warm_up

            def warm_up_and_wait(engine: Engine) -> None:
                warm_up(engine)
                if rank_published.wait(TIME_TO_PUBLISH_S):
                    concurrent.futures.wait([started])

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Engine, "warm_up", warm_up_and_wait)
                main(["--load", f"{model}/saved", "--tokenizer-file", f"{model}/tokenizer.json", "--port", "0"])
            return started.result()


def test_a_run_is_accepted_as_soon_as_rank_0_may_be_published_to_the_hub(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path
) -> None:
    run_ranks(1, write_model, str(tmp_path))
    ((status, found),) = run_ranks(1, serve_and_start_run, str(tmp_path))
    assert status == 201
    assert found >= {FrameType.SCOPE_PART, FrameType.SCOPE_TOKENS}
