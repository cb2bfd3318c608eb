"""Log-probabilities of prompts over the API are those of transformers, in every layout, also as lm-evaluation-harness
asks for them."""

import asyncio
import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from convert_models import save_model
from served_model import TEXTS

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

TOLERANCE = 1e-4
FAMILY = "llama2-mha"
VOCABULARY = 300
LAYOUTS = {
    "alone": (1, ""),
    "TP2": (2, "--tensor-model-parallel-size 2"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
}
CONTEXT, CONTINUATION = "hello world,", " this is a small text about whales"
PROMPTS = [CONTEXT + CONTINUATION, "né à Paris, 日本語", "a"]
TOP = 4
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def make(root: str) -> dict[str, list[list[float]]]:
    """The model in transformers' format and converted; its log-probabilities at each position of each prompt."""
    warnings.simplefilter("ignore")
    import torch

    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions
    from megatronapp_trainer.data.tokenizer import train

    here = pathlib.Path(root)
    model = save_model(FAMILY, here / "hf", vocab_size=VOCABULARY)
    tokenizer = train(TEXTS, VOCABULARY)
    tokenizer.backend.save(str(here / "hf" / "tokenizer.json"))
    convert(ConversionOptions(load_dir=here / "hf", save_dir=here / "ours"))
    with torch.no_grad():
        logits = {text: model(torch.tensor([tokenizer.tokenize(text)])).logits[0] for text in PROMPTS}
    found: dict[str, list[list[float]]] = {
        text: logits_of_text.log_softmax(-1).tolist() for text, logits_of_text in logits.items()
    }
    return found


def complete_all(root: str, flags: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Run on every rank of a layout; return the answers to these requests on rank 0 alone."""
    warnings.simplefilter("ignore")
    from serving_ranks import served

    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.serve.rank_main import load
    from megatronapp_trainer.serve.settings import configure, read_command

    arguments = f"--load {root}/ours --max-batch-size 2 --prefill-chunk 7 {flags}"
    command = read_command(arguments.split())
    config = configure(command)
    gang = load(command, config)
    if gang.runner.layout.rank:
        gang.follow()
        destroy_groups()
        return None

    async def answers() -> list[dict[str, Any]]:
        async with served(gang, command, config) as client:
            responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            return [answer.json() for answer in responses]

    found = asyncio.run(answers())
    destroy_groups()
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def plain(run_ranks: RunRanks, root: pathlib.Path) -> dict[str, list[list[float]]]:
    """Log-probabilities of transformers, by text, position and token."""
    found: dict[str, list[list[float]]] = run_ranks(1, make, str(root), environment=OFFLINE)[0]
    return found


@pytest.fixture(scope="module")
def ids(root: pathlib.Path, plain: object) -> Callable[[str], list[int]]:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(root / "hf" / "tokenizer.json"))
    return lambda text: backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_are_scored_as_transformers_scores_them(
    run_ranks: RunRanks, root: pathlib.Path, plain: Any, ids: Callable[[str], list[int]], layout: str
) -> None:
    world, flags = LAYOUTS[layout]
    echoed = {"prompt": PROMPTS, "echo": True, "logprobs": TOP, "max_tokens": 0, "add_special_tokens": False}
    context, whole = ids(CONTEXT), ids(CONTEXT) + ids(CONTINUATION)
    # As lm-evaluation-harness' local-completions asks for the log-likelihood of a continuation.
    harness = {"prompt": [whole], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answers = run_ranks(world, complete_all, str(root), flags, [echoed, harness])[0]
    for choice, text in zip(answers[0]["choices"], PROMPTS, strict=True):
        check_scores(choice, text, ids(text), plain[text])
    assert answers[0]["usage"] == {
        "prompt_tokens": (count := sum(len(ids(text)) for text in PROMPTS)),
        "completion_tokens": 0,
        "total_tokens": count,
    }
    scored = answers[1]["choices"][0]["logprobs"]
    likelihood = sum(scored["token_logprobs"][len(context) : -1])
    expected = [plain[PROMPTS[0]][place][token] for place, token in enumerate(whole[1:])][len(context) - 1 :]
    assert likelihood == pytest.approx(sum(expected), abs=TOLERANCE)
    assert len(scored["token_logprobs"]) == len(whole) + 1, "the last is of the generated token"


def check_scores(choice: dict[str, Any], text: str, tokens: list[int], plain: list[list[float]]) -> None:
    scored = choice["logprobs"]
    assert (choice["text"], choice["token_ids"], scored["token_ids"]) == (text, tokens, tokens)
    assert (choice["finish_reason"], scored["token_logprobs"][0], scored["top_logprobs"][0]) == ("length", None, None)
    for place, token in enumerate(tokens[1:]):
        before = plain[place]
        assert scored["token_logprobs"][place + 1] == pytest.approx(before[token], abs=TOLERANCE)
        best = sorted(range(VOCABULARY), key=lambda token_id: -before[token_id])[:TOP]
        top = scored["top_logprobs"][place + 1]
        assert list(top.values()) == pytest.approx([before[token_id] for token_id in best], abs=TOLERANCE)
        # As a greedy choice is found: the token's name is that of the likeliest candidate.
        assert (scored["tokens"][place + 1] == next(iter(top))) == (token == best[0])
    starts = scored["text_offset"]
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] <= len(text)
    assert len(starts) == len(tokens)


def test_the_first_part_of_an_echoed_stream_is_its_prompt(run_ranks: RunRanks, root: pathlib.Path, plain: Any) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "seed": 1, "n": 2, "ignore_eos": True, "logprobs": 0}
    alone, echoed, stream, (status, refusal) = run_ranks(1, complete_three_ways, str(root), body)[0]
    assert (status, refusal["code"]) == (422, "no-chat-template")
    assert "messages need the model's chat template, and ours has none" in refusal["error"]["message"]
    for unechoed, other in zip(alone["choices"], echoed["choices"], strict=True):
        assert other["text"] == "hello" + unechoed["text"]
        assert other["token_ids"][-3:] == unechoed["token_ids"]
        shifted = [place + len("hello") for place in unechoed["logprobs"]["text_offset"]]
        assert other["logprobs"]["text_offset"][-3:] == shifted
        assert other["logprobs"]["token_logprobs"][-3:] == unechoed["logprobs"]["token_logprobs"]
    assert alone["usage"] == echoed["usage"]
    parts = [choice for chunk in stream for choice in chunk["choices"]]
    for index, choice in enumerate(echoed["choices"]):
        mine = [part for part in parts if part["index"] == index]
        assert mine[0]["text"] == "hello"
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]


def complete_three_ways(root: str, body: dict[str, Any]) -> list[Any]:
    """Request without the prompt, with it, and with it as a stream."""
    from serving_ranks import served

    from megatronapp_trainer.serve.rank_main import load
    from megatronapp_trainer.serve.settings import configure, read_command

    warnings.simplefilter("ignore")
    command = read_command(["--load", f"{root}/ours", "--max-batch-size", "2"])
    config = configure(command)
    gang = load(command, config)

    async def answers() -> list[Any]:
        async with served(gang, command, config) as client:
            whole = [
                (await client.post("/v1/completions", json=body | {"echo": echo})).json() for echo in (False, True)
            ]
            streamed = await client.post("/v1/completions", json=body | {"echo": True, "stream": True})
            data = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
            chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
            return [*whole, [json.loads(event) for event in data], (chat.status_code, chat.json())]

    return asyncio.run(answers())


def test_the_source_of_a_patch_is_tokenized_once_and_not_by_the_event_loop(
    run_ranks: RunRanks, root: pathlib.Path, plain: Any
) -> None:
    statuses, threads = run_ranks(1, complete_patched, str(root))[0]
    assert statuses == [200, 200]
    assert threads == [False]


def complete_patched(root: str) -> tuple[list[int], list[bool]]:
    """Request twice with a patch; return the statuses, and whether the loop's thread tokenized each source."""
    import threading

    from serving_ranks import served

    from megatronapp_trainer.serve.rank_main import load
    from megatronapp_trainer.serve.settings import configure, read_command

    warnings.simplefilter("ignore")
    command = read_command(["--load", f"{root}/ours", "--max-batch-size", "2"])
    config = configure(command)
    gang = load(command, config)
    action = {"type": "patch", "source": {"prompt": "a text"}}
    recipe = {"perturbations": [{"kind": "calculation", "site": "mlp2", "action": action, "positions": [{"end": 1}]}]}
    threads: list[bool] = []

    async def answers() -> list[int]:
        async with served(gang, command, config) as client:
            perturbation = gang.runner.perturbation
            encode, loop = perturbation.encode, threading.get_ident()
            assert encode is not None

            def counted(text: str) -> Any:
                threads.append(threading.get_ident() == loop)
                return encode(text)

            perturbation.encode = counted
            body = {"prompt": "hello", "max_tokens": 1, "perturbation": recipe}
            return [(await client.post("/v1/completions", json=body)).status_code for _ in range(2)]

    return asyncio.run(answers()), threads
