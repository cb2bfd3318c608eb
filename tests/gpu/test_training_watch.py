"""Tests on devices of what users watch a training by: profiles and compared weights; and fine-tuning on chats."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from device_training import MODEL, train

RunRanks = Callable[..., list[Any]]
CHAT = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
"""Template of a chat whose answers begin where the prompt ends."""


def test_a_profile_has_the_kernels_of_its_steps(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    window = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5"
    (profiled,) = run_ranks(1, train, f"--deterministic-mode {window} --profile-dir {tmp_path}")
    (plain,) = run_ranks(1, train, "--deterministic-mode")
    assert profiled["losses"] == plain["losses"]
    (path,) = tmp_path.iterdir()
    categories = [event.get("cat") for event in json.loads(path.read_text())["traceEvents"]]
    assert "kernel" in categories


@pytest.mark.gpus(2)
@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"])
def test_equal_weights_of_replicas_change_nothing(run_ranks: RunRanks, flags: str) -> None:
    checked = run_ranks(2, train, f"--deterministic-mode {flags} --check-weight-hash-across-dp-replicas-interval 2")
    plain = run_ranks(2, train, f"--deterministic-mode {flags}")
    assert [rank["losses"] for rank in checked] == [rank["losses"] for rank in plain]


def write_chats(folder: pathlib.Path) -> str:
    """Write conversations and a tokenizer with a template; return the flags that read them."""
    from megatronapp_trainer.data import tokenizer

    vocabulary = ["river", "king", "gradient", "pipeline", "step", "loss"]
    chats = [
        [
            {"role": "user", "content": " ".join(vocabulary[(number + place) % 6] for place in range(1 + number % 4))},
            {
                "role": "assistant",
                "content": " ".join(vocabulary[(number * place) % 6] for place in range(2 + number % 5)),
            },
        ]
        for number in range(48)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    trained = tokenizer.train((message["content"] for chat in chats for message in chat), 300)
    trained.backend.add_special_tokens(["<|end|>"])
    trained.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = MODEL.replace("--mock-data --vocab-size 120", "--sft")
    return f"{model} --data-path {folder}/chats.jsonl --split 100,0,0 --tokenizer-file {folder}/tokenizer.json"


def test_fine_tuning_has_the_losses_of_the_processor(
    run_ranks: RunRanks, on_processor: RunRanks, tmp_path: pathlib.Path
) -> None:
    model = write_chats(tmp_path)
    (device,) = run_ranks(1, train, "", model)
    (processor,) = on_processor(1, train, "", model)
    assert device["losses"] == pytest.approx(processor["losses"], abs=1e-4)
