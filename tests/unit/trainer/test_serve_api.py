"""A real server with a tiny model: what clients of OpenAI's interface send, what is refused, the queue, and the end."""

import contextlib
import json
import pathlib
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from served_model import POSITIONS, ModelServer, started, write_model

BATCH, QUEUE, MOST = 2, 1, 1900
TRIES = 5
"""Tries of what succeeds if this process is not stopped while the server generates."""
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"prompt": "hello", "max_tokens": MOST, "ignore_eos": True, "stream": True}
SHIFT = {"perturbations": [{"kind": "system", "action": {"type": "gaussian", "coefficient": 0.5}}]}


@pytest.fixture(scope="module")
def model(run_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("model")
    run_ranks(1, make, str(folder))
    return folder


def make(folder: str) -> None:
    write_model(folder)


@pytest.fixture(scope="module")
def server(forkserver: Any, model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    arguments = f"--max-batch-size {BATCH} --queue-length {QUEUE} --max-tokens {MOST} --tokenizer-file"
    folder, python = tmp_path_factory.mktemp("server"), forkserver.python()
    named = ("--scope-perturbations", json.dumps([{"name": "shift", "recipe": SHIFT}]))
    with started(folder, model, *arguments.split(), str(model / "tokenizer.json"), *named, python=python) as server:
        yield server


@pytest.fixture
def client(server: ModelServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def events(response: httpx.Response) -> Iterator[tuple[str | None, str]]:
    """Names and data of server-sent events."""
    name = None
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, value
            name = None


def chunks(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        found = [data for _, data in events(response)]
    assert found[-1] == "[DONE]"
    return [json.loads(data) for data in found[:-1]]


def test_a_perturbed_answer_names_its_recipe(client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": ["hello world", "whales"], "max_tokens": 6, "seed": 5}
    clean, named, written = (complete(client, **body, perturbation=given) for given in ("none", "shift", SHIFT))
    assert clean["perturbation"] is None
    assert named["perturbation"] == written["perturbation"] == {"digest": "44dab0bc4f01"}
    assert named["choices"] == written["choices"] != clean["choices"]
    assert complete(client, **body)["choices"] == clean["choices"]
    parts = chunks(client, **body, perturbation="44dab0bc4f01")
    assert {part["perturbation"]["digest"] for part in parts} == {"44dab0bc4f01"}
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "perturbation": {}})
    assert (chat.status_code, chat.json()["message"]) == (422, "perturbation.perturbations: must be given")
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2, "perturbation": "shift"})
    assert chat.json()["perturbation"] == named["perturbation"]


def test_a_perturbation_that_the_model_cannot_have_is_refused(client: httpx.Client) -> None:
    beyond = {"perturbations": [{"kind": "system", "layers": [2], "action": {"type": "uniform", "coefficient": 0}}]}
    for given, message in (
        (beyond, "perturbation: perturbations.0.layers.0: there is no layer 2; write 0 to 1"),
        ("other", "perturbation: this server has no recipe other"),
        (3, "perturbation: must be a recipe (an object), or the name or digest of a recipe of this server"),
    ):
        answer = client.post("/v1/completions", json={"prompt": "hello", "perturbation": given})
        assert (answer.status_code, answer.json()["message"]) == (422, message)


def test_a_run_of_megascope_has_its_recipe_in_its_state(client: httpx.Client) -> None:
    started_run = client.post("/scope/v1/runs", json={"prompts": ["hello"], "tokens": 1, "perturbation": "shift"})
    found = client.get(f"/scope/v1/runs/{started_run.json()['run']}").json()
    assert found["perturbation"]["digest"] == found["header"]["perturbation"]["digest"] == "44dab0bc4f01"
    assert found["perturbation"]["recipe"] == {"version": 1, **SHIFT}


def test_a_stream_gives_the_same_text_as_a_whole_answer(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": ["hello world", "whales"], "max_tokens": 12, "seed": 5}
    whole = complete(client, **body)
    parts = chunks(client, **body, stream_options={"include_usage": True})
    assert parts[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    for choice in whole["choices"]:
        mine = [
            part_choice for part in parts for part_choice in part["choices"] if part_choice["index"] == choice["index"]
        ]
        assert "".join(part_choice["text"] for part_choice in mine) == choice["text"]
        assert [token for part_choice in mine for token in part_choice["token_ids"]] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] != None  # noqa: E711 - a chain


def test_texts_and_their_ids_are_the_same_prompt(client: httpx.Client, model: pathlib.Path) -> None:
    import tokenizers

    ids = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).encode("hello world").ids
    body = {"max_tokens": 6, "temperature": 0}
    texts = [complete(client, prompt=prompt, **body)["choices"][0]["text"] for prompt in ("hello world", ids, [ids])]
    assert len(set(texts)) == 1


def test_seeds_copies_stops_and_logprobs(client: httpx.Client) -> None:
    two = complete(client, prompt="hello", max_tokens=8, seed=7, n=2, logprobs=3)["choices"]
    other = complete(client, prompt="hello", max_tokens=8, seed=8)["choices"][0]
    assert two[1]["token_ids"] == other["token_ids"] != two[0]["token_ids"]
    alike = complete(client, prompt=["hello", "hello"], max_tokens=8, seed=7)["choices"]
    assert [choice["token_ids"] for choice in alike] == [choice["token_ids"] for choice in two]
    logprobs = two[0]["logprobs"]
    assert logprobs["token_ids"] == two[0]["token_ids"]
    assert all(len(candidates) == 3 for candidates in logprobs["top_logprobs"])
    assert all(value < 0 for value in logprobs["token_logprobs"])
    tokens = other["token_ids"]
    stopped = complete(client, prompt="hello", max_tokens=8, seed=8, stop_token_ids=[tokens[2:4]])["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", tokens[2:4])
    assert stopped["token_ids"] == tokens[:4]


def test_an_empty_prompt_begins_a_document(client: httpx.Client) -> None:
    assert complete(client, prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1


def test_the_model_is_listed(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["has_tokenizer"]) == ("tiny", POSITIONS, True)
    assert client.get("/v1/models/tiny").json() == card
    assert client.get("/v1/models/other").json()["code"] == "no-such-model"


@pytest.mark.parametrize(
    ("change", "status", "param", "message"),
    [
        ({"prompt": []}, 422, "prompt", "prompt"),
        ({"prompt": [1, 300]}, 422, "prompt", "token 1 is 300; the vocabulary has ids 0 to 299"),
        ({"prompt": 5}, 422, "prompt", "prompt: must be a string, a list of strings, a list of token ids, or"),
        ({"prompt": ["a", 1]}, 422, "prompt", "prompt.1: must be a string"),
        ({"prompt": [[1], ["a"]]}, 422, "prompt", "prompt.1.0: must be a whole number"),
        ({"stop": 5}, 422, "stop", "stop: must be a string or a list of strings"),
        ({"prompt": ["a"] * (BATCH + QUEUE + 1)}, 413, "prompt", "4 texts are requested; the limit is 3"),
        ({"n": 4}, 413, "n", "4 texts"),
        ({"max_tokens": MOST + 1}, 413, "max_tokens", f"is over {MOST}"),
        ({"prompt": [1] * 200, "max_tokens": MOST}, 413, "max_tokens", "ask for at most 1848"),
        ({"temperature": -1}, 422, "temperature", "temperature: must be 0 or more"),
        ({"temperature": True}, 422, "temperature", "temperature: must be a number"),
        ({"prompt": [1] * POSITIONS}, 413, "max_tokens", "shorten the prompt to at most 2047 tokens"),
        ({"temperature": 0.0001}, 422, "temperature", "temperature"),
        ({"best_of": 2}, 422, "best_of", "best_of"),
        ({"presence_penalty": 0.5}, 422, "presence_penalty", "presence_penalty"),
        ({"max_token": 4}, 422, "max_token", "max_token: there is no such field"),
        ({"model": "gpt-4"}, 404, "model", "there is no model gpt-4, only tiny"),
    ],
)
def test_a_wrong_request_is_refused_with_its_place(
    client: httpx.Client, change: dict[str, Any], status: int, param: str, message: str
) -> None:
    answer = client.post("/v1/completions", json={"prompt": "hello"} | change)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["message"]
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].endswith(answer.json()["hint"]), "OpenAI's clients show nothing else"


def test_more_texts_than_run_together_wait_for_each_other(client: httpx.Client) -> None:
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    alone = complete(client, prompt="hello", **body)["choices"][0]
    together = complete(client, prompt=["hello", "whales", "hello"], **body)["choices"]
    assert len(together) == BATCH + QUEUE
    assert [completion["token_ids"] for completion in together][::2] == [alone["token_ids"]] * 2


def test_a_malformed_body_is_refused_with_its_position(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content='{"prompt": }', headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["message"] == "the body: is not valid JSON: Expecting value (character 11)"
    assert answer.json()["error"]["param"] is None


def test_requests_without_the_key_are_refused(server: ModelServer) -> None:
    for token in ("", "wrong", "é"):
        with server.client("" if token == "é" else token) as stranger:
            headers = {b"Authorization": b"Bearer \xe9"} if token == "é" else {}
            for path in ("/v1/models", "/metrics", "/scope/v1/runs", "/nothing"):
                answer = stranger.get(path, headers=headers)
                assert answer.status_code == 401, (token, path)
                assert answer.json()["code"] == "unauthorised"
                assert "`megatronapp serve --print tiny` prints the key" in answer.json()["hint"]
            assert stranger.get("/healthz").is_success


def test_too_large_a_body_is_not_read(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", content=b'{"prompt":"' + b"a" * (5 << 20) + b'"}')
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")


def cancelled(client: httpx.Client) -> float:
    """Return the number of requests whose clients hung up."""
    found = re.search(r'requests_total{finished_reason="cancelled"} (\S+)', client.get("/metrics").text)
    return float(found[1]) if found else 0.0


def test_the_queue_shows_places_refuses_beyond_and_forgets_who_hangs_up(client: httpx.Client) -> None:
    for _ in range(TRIES):
        before = cancelled(client)
        is_full = check_full_queue(client)
        until_idle(client)
        if is_full and cancelled(client) == before + 3:
            return
    pytest.fail("no three requests were cancelled")


def check_full_queue(client: httpx.Client) -> bool:
    """Fill the queue and hang up; return False if requests ended by themselves before that."""
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(client.stream("POST", "/v1/completions", json=LONG)) for _ in range(2))
        running = [events(stream) for stream in (first, second)]
        for stream in running:
            next(stream)
        waiting = stack.enter_context(
            client.stream("POST", "/v1/completions", json=LONG | {"stream_options": {"include_queue": True}})
        )
        refused = client.post("/v1/completions", json={"prompt": "hello"})
        counts = client.get("/metrics").text
        if not all(f"num_requests_{state}\n" in counts for state in ("waiting 1.0", "running 2.0")):
            return False
        assert waiting.headers["X-Queue-Position"] == "0"
        assert (refused.status_code, refused.json()["code"]) == (429, "queue-full")
        assert refused.headers["Retry-After"] == "1"
        first.close()
        received = events(waiting)
        places = [(name, json.loads(data)["position"]) for name, data in (next(received), next(received))]
        assert places == [("queue", 0), ("queue", None)]
    return True


def until_idle(client: httpx.Client) -> None:
    """Places are free again: a request of the largest size is taken."""
    while "megatronapp_serve_num_requests_running 0.0\n" not in client.get("/metrics").text:
        pass


def cancelled_run(client: httpx.Client, sampling: dict[str, Any]) -> str:
    """Start a run and cancel it before it ends by itself."""
    for _ in range(TRIES):
        started_run = client.post("/scope/v1/runs", json={"prompts": ["hello"], "tokens": 512, "sampling": sampling})
        run: str = started_run.json()["run"]
        assert client.delete(f"/scope/v1/runs/{run}").status_code == 204
        while (state := client.get(f"/scope/v1/runs/{run}").json()["state"]) in {"queued", "prefill", "decoding"}:
            pass
        if state == "cancelled":
            return run
        assert state == "done"
    pytest.fail("no run was cancelled before its end")


def test_runs_of_megascope_outlive_their_request_until_they_are_cancelled(client: httpx.Client) -> None:
    greedy = {"temperature": 0}  # a sampled end of text would be another way to end
    short = client.post("/scope/v1/runs", json={"prompts": ["hello", "whales"], "tokens": 4, "sampling": greedy})
    assert short.status_code == 201
    run = short.json()["run"]
    while (shown := client.get(f"/scope/v1/runs/{run}").json())["state"] != "done":
        assert shown["state"] in {"queued", "prefill", "decoding"}
    assert [len(ids) for ids in shown["ids"]] == [4, 4]
    header, samples = shown["header"], shown["samples"]
    assert (header["run"], header["state"], header["steps"]) == (run, "done", 4)
    for sample, prompt in enumerate(("hello", "whales")):
        described = samples[sample]
        assert (described["ids"], "".join(described["texts"])) == (shown["ids"][sample], shown["texts"][sample])
        assert described["finished"] == [None, None, None, "length"]
        whole = (prompt + shown["texts"][sample]).encode("utf-16-le")
        for text, offset in zip(described["texts"], described["offsets"], strict=True):
            assert text == ("" if offset is None else whole[2 * offset[0] : 2 * offset[1]].decode("utf-16-le"))
    long = cancelled_run(client, greedy)
    listed = [run["run"] for run in client.get("/scope/v1/runs").json()]
    assert (listed[0], run in listed) == (long, True)
    assert client.delete("/scope/v1/runs/000000000000").status_code == 404
    changed = client.patch(f"/scope/v1/runs/{run}", json={"capture": {"preset": "lite"}})
    assert (
        changed.json()["capture"]["preset"] == client.get(f"/scope/v1/runs/{run}").json()["capture"]["preset"] == "lite"
    )
    probed = client.post("/scope/v1/probes", json={"ids": [[1]], "sites": [{"site": "q", "layers": [0]}]})
    assert (probed.status_code, probed.json()["code"]) == (409, "nothing-looks")


def test_a_waiting_request_receives_the_end_of_the_server(model: pathlib.Path, server: ModelServer) -> None:
    with server.client() as client:
        until_idle(client)
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            received = events(response)
            next(received)
            server.process.send_signal(signal.SIGTERM)
            name, data = list(received)[-1]
    assert (name, json.loads(data)["error"]["code"]) == ("error", "stopping")
    assert server.process.wait(240) == 75
