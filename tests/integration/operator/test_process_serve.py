"""`megatronapp serve` with real ranks: the same text alone and of four, a rank that dies while others hang, the end."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import megatronapp_forking
import pytest
from served_job import DEADLINE_S, MEGATRONAPP, Served, command, make_model, served

from megatronapp_common import cli

COMPLETION_REQUEST: dict[str, Any] = {"prompt": ["hello world", "whales"], "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
TWO = ("--pipeline-model-parallel-size", "2")
FOUR = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(run_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_model(run_ranks, tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def in_front(
    state: pathlib.Path, model: pathlib.Path, name: str, *arguments: str, megatronapp: Sequence[str] = MEGATRONAPP
) -> Iterator[tuple[Served, subprocess.Popen[bytes]]]:
    """As in a terminal, which shows what is written to the file `out`."""
    job = Served(state, name)
    serve = [*megatronapp, *command(model, name), *arguments]
    with (state / "out").open("wb") as out:
        process = subprocess.Popen(serve, env=job.environment, stdout=out, stderr=out)
    try:
        yield job, process
    finally:
        process.kill()
        process.wait()


def token_ids(client: httpx.Client, **body: Any) -> list[list[int]]:
    answer = client.post("completions", json={**COMPLETION_REQUEST, **body})
    assert answer.is_success, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def last_event(client: httpx.Client, act: Callable[[], None]) -> tuple[str, str]:
    """Name and code of the end of a long stream in the middle of which something is done."""
    with client.stream("POST", "completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        act()
        *_, name, data = [line for line in lines if line]
    return name, json.loads(data.removeprefix("data: "))["error"]["code"]


@pytest.fixture
def state() -> Iterator[pathlib.Path]:
    """A folder with a short name: that of a Unix socket may have 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def run(state: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `megatronapp` within this process, and return its output."""

    def call(*arguments: str) -> str:
        with monkeypatch.context() as environment:
            environment.setenv("XDG_STATE_HOME", str(state))
            assert cli.main(arguments) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.full("nine processes of torch; two serve below, and test_process_kills restarts gangs")
def test_a_gang_restarts_after_a_kill_and_answers_as_a_single_rank(state: pathlib.Path, model: pathlib.Path) -> None:
    with (
        in_front(state, model, "one", "--no-pages") as (first, process),
        served(state, model, "two", *FOUR) as two,
    ):
        first.until_phase("Running", 0)
        with first.client() as client:
            expected = token_ids(client, model="one")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        two.until_phase("Running", 0)
        with two.client() as client:
            assert token_ids(client, model="two") == expected
            check_scope(two)
            check_hang(two, client)
            two.until_phase("Running", 1)
            assert token_ids(client) == expected
        assert two.status()["restarts"] == 1
        assert two.status()["failures"][0]["rank"] == 3


def test_a_gang_serves_clients_and_pages_until_it_is_stopped(
    state: pathlib.Path, model: pathlib.Path, run: Callable[..., str], forkserver: Any
) -> None:
    megatronapp = megatronapp_forking.command(forkserver.python())
    with in_front(state, model, "two", *TWO, megatronapp=megatronapp) as (two, process):
        two.until_phase("Running", 0)
        two.until_ready()
        check_commands(two, run)
        with two.client() as client:
            check_scope(two)
            assert [len(tokens) for tokens in token_ids(client, model="two")] == [8, 8]
            assert last_event(client, lambda: process.send_signal(signal.SIGINT)) == ("event: error", "stopping")
        assert process.wait(DEADLINE_S) == 130
        text = (state / "out").read_text()
        assert "api: http://127.0.0.1:" in text
        assert text.splitlines()[-2:] == ["two: Suspended (Interrupted)", "stopped"]


def check_hang(two: Served, client: httpx.Client) -> None:
    """Stop rank 1, so that rank 0 hangs in a collective with it; a third one dies, and all ranks are notified."""
    dying, log = two.rank(3), two.folder / "attempt-0" / "worker-0" / "rank-0.log"
    os.kill(two.rank(1), signal.SIGSTOP)
    with client.stream("POST", "completions", json=LONG) as response:
        while not is_taken(client.get("../metrics").text):
            time.sleep(0.05)
        os.kill(dying, signal.SIGKILL)
        *_, name, data = [line for line in response.iter_lines() if line]
    assert (name, json.loads(data.removeprefix("data: "))["error"]["code"]) == ("event: error", "engine-lost")
    two.until_phase("Running", 1)
    assert "this one would wait for it for ever" in log.read_text()


def is_taken(metrics: str) -> bool:
    """One prompt runs, or waits: rank 0 may hang already in what the hub asks for after a run."""
    return any(
        f"\nmegatronapp_serve_{name} 1.0\n" in metrics for name in ("num_requests_running", "num_requests_waiting")
    )


def check_scope(two: Served) -> None:
    """Request a run as a page does: the ranks receive it, and what they capture reaches the hub."""
    two.until_ready()
    with two.hub() as hub:
        run_request = {"prompts": ["hello world", "whales"], "tokens": 4, "sampling": {"temperature": 0}}
        taken = hub.post("scope/runs", json=run_request)
        assert taken.status_code == 201, taken.text
        place = f"scope/runs/{taken.json()['run']}"
        while (run := hub.get(place).json())["state"] != "done":
            assert run["state"] in {"queued", "prefill", "decoding"}, run["error"]
            time.sleep(0.05)
        assert [len(tokens) for tokens in run["generated"]] == [4, 4]
        question = {"sample": 0, "layer": 1, "position": 0}
        while (values := hub.get(f"{place}/values/residual", params=question)).status_code == 202:
            time.sleep(0.05)
        assert len(values.json()["values"][0]) == 32


def check_commands(two: Served, run: Callable[..., str]) -> None:
    assert run("get", "two").splitlines()[1].split()[:2] == ["two", "Running"]
    assert two.status()["serveUrl"] in run("describe", "two")
    assert "serving two at " in run("logs", "two")
    assert "/?page=scope#code=" in run("ui", "two", "--print")
