"""Settings of a server before it loads anything: flags, the checkpoint's manifest, address, and who may use it."""

import itertools
import json
import pathlib
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.responses import PlainTextResponse

from megatronapp_common.names import ExitCode
from megatronapp_common.web.body_limit import BodyLimit
from megatronapp_common.web.guard import Guard
from megatronapp_trainer.errors import CheckpointError, RendezvousError, UsageError
from megatronapp_trainer.serve.app import check_address, listen
from megatronapp_trainer.serve.check import find_problems
from megatronapp_trainer.serve.middleware import MOST_BYTES, TokenCheck, limit_of
from megatronapp_trainer.serve.openai.schemas_completions import CompletionRequest
from megatronapp_trainer.serve.rank_main import limits_of, main
from megatronapp_trainer.serve.settings import configure, read_command
from megatronapp_trainer.serve.statistics import ServerStatistics

STORED: dict[str, Any] = {
    "--num-layers": 4,
    "--hidden-size": 64,
    "--num-attention-heads": 8,
    "--num-query-groups": 2,
    "--seq-length": 32,
    "--max-position-embeddings": 128,
    "--swiglu": True,
    "--vocab-size": 300,
    "--bf16": True,
}
SECRET = "ab" * 32


def write_checkpoint(folder: pathlib.Path, iteration: int = 1, changes: dict[str, Any] | None = None) -> pathlib.Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    manifest = {
        "iteration": iteration,
        "consumed_samples": 0,
        "skipped_iterations": 0,
        "attempt": 0,
        "layout": {},
        "optimizer": None,
        "random_states": False,
        "arguments": STORED | (changes or {}),
    }
    (path / "megatronapp.json").write_text(json.dumps(manifest | {"files": {}, "format": 1}))
    return path


def configured(folder: pathlib.Path, *arguments: str) -> Any:
    return configure(read_command(["--load", str(folder), *arguments]))


def test_the_model_is_read_from_the_checkpoint(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path)
    config = configured(tmp_path, "--tensor-model-parallel-size", "2")
    assert (config.model.num_layers, config.model.heads_of_keys, config.model.swiglu) == (4, 2, True)
    assert (config.model.positions, config.data.vocab_size) == (128, 300)
    assert config.precision.bf16
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.checkpoint.save is None
    for flags in (("--precision", "fp16"), ("--fp16",), ("--precision", "fp16", "--fp16")):
        assert configured(tmp_path, *flags).precision.name == "fp16"
    assert configured(tmp_path, "--precision", "fp32").precision.name == "fp32"
    with pytest.raises(UsageError, match="--precision fp32 and --fp16 contradict each other"):
        configured(tmp_path, "--precision", "fp32", "--fp16")


LIMITS = [
    ((), (8, 127)),
    (("--max-batch-size", "2", "--max-tokens", "40"), (2, 40)),
    (("--max-batch-size", "64", "--max-length", "33"), (8, 32)),
]


@pytest.mark.parametrize(("arguments", "limits"), LIMITS)
def test_limits_of_a_run_are_known_before_the_model_is_loaded(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], limits: tuple[int, int]
) -> None:
    write_checkpoint(tmp_path)
    command = read_command(["--load", str(tmp_path), *arguments])
    assert limits_of(command, configure(command)) == {"prompts": limits[0], "tokens": limits[1]}


def test_the_newest_whole_checkpoint_is_served(tmp_path: pathlib.Path) -> None:
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2, {"--num-layers": 6})
    (write_checkpoint(tmp_path, 3) / "megatronapp.json").write_text("{")
    assert configured(tmp_path).model.num_layers == 6


def test_the_tokenizer_of_the_checkpoint_is_used_unless_another_is_named(tmp_path: pathlib.Path) -> None:
    path = write_checkpoint(tmp_path, 1, {"--tokenizer-file": "tokenizer.json"})
    assert configured(tmp_path).data.tokenizer_file == str(path / "tokenizer.json")
    assert configured(tmp_path, "--tokenizer-file=other.json").data.tokenizer_file == "other.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--load is missing"),
        (("--load", "x", "--port", "70000"), "--port 70000 is no port"),
        (("--load", "x", "--max-batch-size", "0"), "--max-batch-size 0 is too small; write 1 or more"),
        (("--load", "x", "--queue-length", "-1"), "--queue-length -1 is too small; write 0 or more"),
        (("--load", "x", "--precision", "fp8"), "invalid choice: 'fp8'"),
        (
            ("--load", "x", "--context-parallel-size", "2"),
            "--context-parallel-size is for training, and a server would ignore it; leave it out",
        ),
        (("--load", "x", "--use-dpp"), "--use-dpp is for training, and a server would ignore it; leave it out"),
        (("--load", "x", "--num-gpus", "2"), "--num-gpus is for training"),
        (("--load", "x", "--multi-node"), "--multi-node is for training"),
        (("--load", "x", "--node-ips", "10.0.0.1"), "--node-ips is for training"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=message):
        read_command(arguments)
    assert main(arguments) == ExitCode.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "world", "code", "flag", "message"),
    [
        ((), 1, None, None, ""),
        (("--tensor-model-parallel-size", "2"), 2, None, None, ""),
        (("--tensor-model-parallel-size", "2"), 4, ExitCode.USAGE, None, "4 ranks cannot serve one replica of 2"),
        (("--tensor-model-parallel-size", "3"), 3, ExitCode.USAGE, "--tensor-model-parallel-size", "3"),
        (("--max-length", "129"), 1, ExitCode.USAGE, "--max-length", "over the model's 128 learned positions"),
        (("--tokenizer-file", "none.json"), 1, ExitCode.DATA, None, "none.json does not exist"),
        (("--use-dpp",), 1, ExitCode.USAGE, "--use-dpp", "is for training"),
        (("--lerning-rate", "1"), 1, ExitCode.USAGE, "--lerning-rate", "unknown flag"),
    ],
)
def test_unservable_settings_are_reported_before_anything_is_started(
    tmp_path: pathlib.Path, *, arguments: tuple[str, ...], world: int, code: int | None, flag: str | None, message: str
) -> None:
    write_checkpoint(tmp_path)
    found = find_problems(["--load", str(tmp_path), *arguments], world)
    assert [problem.code for problem in found] == ([] if code is None else [code])
    assert all(message in problem.message for problem in found)
    assert flag is None or flag in found[0].flags


def test_a_model_with_experts_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_checkpoint(tmp_path, changes={"--num-experts": 8})
    with pytest.raises(UsageError, match="a model with --num-experts 8, and such models generate no text yet"):
        configure(read_command(["--load", str(tmp_path)]))
    assert path.is_dir()


@pytest.mark.parametrize(("stored", "flags"), [("bert", ()), ("gpt", ("--model-type", "bert")), (None, ())])
def test_a_model_that_generates_no_text_is_not_served(
    tmp_path: pathlib.Path, stored: str | None, flags: tuple[str, ...]
) -> None:
    write_checkpoint(tmp_path, 1, {} if stored is None else {"--model-type": stored})
    found = find_problems(["--load", str(tmp_path), *flags], 1)
    if stored is None:
        assert found == []
        return
    assert [(problem.code, problem.flags) for problem in found] == [(ExitCode.USAGE, ("--model-type",))]
    assert "--model-type bert, which generates no text; only gpt is served" in found[0].message


def test_a_folder_without_a_checkpoint_is_reported_under_its_flag(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        configured(tmp_path)
    (problem,) = find_problems(["--load", str(tmp_path)], 1)
    assert problem.flags == ("--load",)


def test_without_a_secret_only_this_host_is_admitted() -> None:
    check_address("127.0.0.1", None)
    check_address("0.0.0.0", SECRET)
    with pytest.raises(UsageError, match="lets other nodes connect"):
        check_address("0.0.0.0", None)


def test_a_port_in_use_is_reported() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


@pytest.mark.asyncio
async def test_requests_of_other_sites_are_refused_without_a_key() -> None:
    app = Guard(PlainTextResponse("hello"), check=TokenCheck(None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:1") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers={"Origin": "http://localhost:1"})).status_code == 200
        other = await client.post("/v1/completions", headers={"Origin": "http://elsewhere"})
        assert (other.status_code, other.json()["code"]) == (403, "other-origin")


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "status"), [(MOST_BYTES, 200), (MOST_BYTES + 1, 413)])
async def test_bodies_have_a_limit(size: int, status: int) -> None:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(BodyLimit(PlainTextResponse("hello"), limit_of=limit_of)), base_url="http://here"
    ) as client:
        assert (await client.post("/", content=bytes(size))).status_code == status


@pytest.mark.parametrize("prompt", [[-1] * 100_000, [[-1]] * 1000, [1.5] * 100_000])
def test_a_long_prompt_is_judged_up_to_its_first_bad_token(prompt: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": prompt})
    assert refused.value.error_count() <= 4  # one for each kind of prompt


def test_statistics_that_are_never_queried_forget_old_tokens() -> None:
    from megatronapp_trainer.inference.events import TokenEvent

    clock = itertools.count(0.0, 1.0)
    statistics = ServerStatistics(lambda: next(clock))
    token = TokenEvent(request_id="a", index=0, token=1, logprob=-1.0, candidates=(), text=None, logits=None)
    for _ in range(1000):
        statistics.count([token])
    assert len(statistics._recent) < 20


def test_waiting_first_and_further_tokens_are_timed_by_size() -> None:
    from megatronapp_trainer.inference.events import FinishedEvent, FinishReason, TokenEvent

    now = 10.0
    statistics = ServerStatistics(lambda: now)

    def token(request_id: str, index: int) -> TokenEvent:
        return TokenEvent(
            request_id=request_id, index=index, token=1, logprob=-1.0, candidates=(), text=None, logits=None
        )

    def end(request_id: str, reason: FinishReason) -> FinishedEvent:
        return FinishedEvent(request_id=request_id, reason=reason, prompt_tokens=0, generated_tokens=0)

    statistics.submitted(["a", "b", "c"])
    statistics.admitted("probe")
    statistics.count([token("probe", 0), token("probe", 1), end("probe", "length")])
    now = 10.5
    statistics.admitted("a")
    now = 12.0
    statistics.count([token("a", 0)])
    now = 12.25
    statistics.count([token("a", 1)])
    now = 390.0
    statistics.count([end("c", "length")])
    now = 400.0
    statistics.count([end(request_id, "cancelled") for request_id in "ab"])
    statistics.admitted("b")
    statistics.count([token("a", 2), token("b", 0)])
    assert statistics.prompts == 3, "the probe is not counted"
    text = statistics.exposition(waiting=0, running=0).decode()
    for name, bounds, seconds in (
        ("request_queue_time", ('0.25"} 0', '0.5"} 1', '+Inf"} 1'), 0.5),
        ("time_to_first_token", ('1.0"} 0', '2.5"} 1', '+Inf"} 1'), 2.0),
        ("e2e_request_latency", ('300.0"} 0', '600.0"} 1', '+Inf"} 1'), 380.0),
        ("inter_token_latency", ('0.15"} 0', '0.25"} 1', '+Inf"} 1'), 0.25),
    ):
        metric = f"megatronapp_serve_{name}_seconds"
        assert f"# TYPE {metric} histogram\n" in text
        for bound in bounds:
            assert f'{metric}_bucket{{le="{bound}.0\n' in text
        assert f"{metric}_count 1.0\n{metric}_sum {seconds}\n" in text


def test_tokens_per_second_forget_what_is_old() -> None:
    from megatronapp_trainer.inference.events import FinishedEvent, TokenEvent

    times = [1.0, 1.0, 2.0, 3.0, 3.0, 12.5]
    statistics = ServerStatistics(lambda: times.pop(0) if times else 13.0)
    statistics.submitted(["a"])
    token = TokenEvent(request_id="a", index=0, token=1, logprob=-1.0, candidates=(), text=None, logits=None)
    for _ in range(3):
        statistics.count([token, token])
    assert statistics.tokens_per_second() == 0.6
    assert statistics.tokens_per_second() == 0.2
    statistics.count([FinishedEvent(request_id="a", reason="stop", prompt_tokens=5, generated_tokens=6)])
    text = statistics.exposition(waiting=3, running=1).decode()
    for line in (
        "megatronapp_serve_num_requests_waiting 3.0",
        'megatronapp_serve_requests_total{finished_reason="stop"} 1.0',
        "megatronapp_serve_prompt_tokens_total 5.0",
        "megatronapp_serve_generation_tokens_total 6.0",
    ):
        assert f"{line}\n" in text
