"""Supervised fine-tuning: answers of conversations, packed samples, and their training next to separate ones."""

import itertools
import json
import pathlib
import random
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_training
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.errors import DataError, UsageError

RunRanks = Callable[..., list[Any]]

CHAT = (
    "{% for message in messages %}{{ '<|' ~ message['role'] ~ '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NOUNS = ["river", "king", "gradient", "pipeline", "straße", "日本", "step", "loss"]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 96 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 2e-3 --eval-iters 1 --hidden-dropout 0 --attention-dropout 0 --sft"
)


def conversation(draw: random.Random, rounds: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": " ".join(draw.choices(NOUNS, k=2))}]
    for _ in range(rounds):
        messages.append({"role": "user", "content": " ".join(draw.choices(NOUNS, k=draw.randint(1, 5)))})
        messages.append({"role": "assistant", "content": " ".join(draw.choices(NOUNS, k=draw.randint(1, 6)))})
    return messages


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a tokenizer that has a chat template, and the conversations chats.jsonl."""
    from megatronapp_trainer.data import tokenizer

    folder = tmp_path_factory.mktemp("chats")
    draw = random.Random(11)
    found = [conversation(draw, draw.randint(1, 3)) for _ in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in found))
    trained = tokenizer.train((message["content"] for messages in found for message in messages), 300)
    trained.backend.add_special_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
    trained.backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def flags_of(chats: pathlib.Path) -> str:
    return f"{FLAGS} --data-path {chats}/chats.jsonl --split 80,20,0 --tokenizer-file {chats}/tokenizer.json"


def data_config(chats: pathlib.Path) -> Any:
    from megatronapp_trainer.config import parse

    return parse(flags_of(chats).split()).data


def test_tokens_and_answers_are_those_of_transformers(chats: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    from megatronapp_trainer.data.sft.answers import AnswerTokenizer, render
    from megatronapp_trainer.data.sft.conversations import read_conversations

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = AutoTokenizer.from_pretrained(str(chats))
    ours = AnswerTokenizer(data_config(chats), "default")
    conversations = [messages for _, messages in read_conversations(str(chats / "chats.jsonl"))]
    rendered = [render(messages, ours.template) for messages in conversations]
    for messages, tokenized in zip(conversations, ours.tokenize(rendered), strict=True):
        expected: Any = reference.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert tokenized.tokens.tolist() == expected["input_ids"]
        assert tokenized.is_answer.astype(int).tolist() == expected["assistant_masks"]


def test_a_conversation_is_ended(chats: pathlib.Path) -> None:
    from megatronapp_trainer.data.sft.answers import AnswerTokenizer, render

    ours = AnswerTokenizer(data_config(chats), "identity")
    answered = [{"role": "user", "content": "river "}, {"role": "assistant", "content": "king"}]
    continued = [*answered, {"role": "user", "content": "step"}]
    first, second = ours.tokenize([render(messages, ours.template) for messages in (answered, continued)])
    assert (first.tokens[-1], first.is_answer[-1]) == (ours.end, True)
    assert (second.tokens[-1], second.is_answer[-1]) == (ours.end, False)
    text = ours.tokenizer.detokenize([int(token) for token in first.tokens[first.is_answer]])
    assert text == " king<|end|>", "a token with the first character of the answer belongs to it"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(0, 5), st.integers(1, 300))
def test_each_epoch_has_every_conversation_once(lengths: list[int], seed: int, samples: int) -> None:
    from megatronapp_trainer.data.sft.packing import pack, packed_epochs

    capacity = 32
    for packed in pack(lengths, range(len(lengths)), capacity):
        assert sum(min(lengths[number], capacity) for number in packed) <= capacity
    (once, enough) = (packed_epochs(lengths, capacity, seed=seed, samples=count) for count in (None, samples))
    assert sorted(number for packed in once for number in packed) == list(range(len(lengths)))
    assert len(enough) >= samples
    assert enough[: len(once)] == once
    counts = np.bincount([number for packed in enough for number in packed], minlength=len(lengths))
    assert len(set(counts.tolist())) == 1


def test_packing_leaves_few_places_empty() -> None:
    from megatronapp_trainer.data.sft.packing import packed_epochs

    draw = random.Random(2)
    lengths = [draw.randint(20, 600) for _ in range(2000)]
    samples = packed_epochs(lengths, 1024, seed=1, samples=None)
    assert sum(lengths) / (1024 * len(samples)) > 0.97


def losses_of_samples(flags: str) -> list[tuple[list[float], list[float]]]:
    """Losses of the answers of packed samples, and those of the same conversations alone, token by token."""
    import torch

    from megatronapp_trainer.models.registry import model_family
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(flags)
    family = model_family(run.config)
    source, (chunk,) = family.batch_source(run.config, run.layout, run.device), run.state.chunks
    batches = [next(build_iterators(run.config, run.layout, 0).train) for _ in range(2)]
    found = []
    for batch in batches:
        with torch.no_grad():
            packed = family.forward(chunk, source.read(iter([batch]), 1)[0])
        for row, positions in enumerate(batch["position_ids"]):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
            for first, last in itertools.pairwise(starts):
                mask = batch["loss_mask"][row, first:last].bool()
                if not mask.any():
                    continue
                alone = {name: torch.zeros_like(value) for name, value in batch.items()}
                for name, value in batch.items():
                    alone[name][0, : last - first] = value[row, first:last]
                alone["position_ids"] = torch.arange(len(positions)).expand_as(positions.expand(2, -1)).clone()
                with torch.no_grad():
                    separate = family.forward(chunk, source.read(iter([alone]), 1)[0])
                found.append((packed[row, first:last][mask].tolist(), separate[0, : last - first][mask].tolist()))
    return found


@pytest.mark.torch
@pytest.mark.full("two kinds of positions", but=("rope",))
@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_packed_conversations_are_computed_as_if_alone(
    chats: pathlib.Path, run_ranks: RunRanks, positions: str
) -> None:
    """Losses of each answer's tokens are equal within 1e-5 (fp32, other sums in attention)."""
    (found,) = run_ranks(1, losses_of_samples, f"{flags_of(chats)} --position-embedding-type {positions}")
    assert len(found) > 6, "several conversations to a sample"
    for packed, separate in found:
        assert packed == pytest.approx(separate, abs=1e-5)


def trained(flags: str) -> tuple[list[float], float | None]:
    """Losses of a run that resumes where it can, and the loss of its first step in plain torch."""
    import torch
    from torch.nn import functional

    from megatronapp_trainer.training.build import build_iterators

    run, manager = small_training.resumed(flags)
    plain = None
    if run.layout.world_size == 1 and not run.state.iteration:
        (chunk,) = run.state.chunks
        total = tokens = 0.0
        batches = build_iterators(run.config, run.layout, 0).train
        for batch in (next(batches) for _ in range(2)):
            for row in range(2):
                starts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), 96]
                for first, last in itertools.pairwise(starts):
                    part = {name: value[row, first:last] for name, value in batch.items()}
                    with torch.no_grad():
                        logits = chunk(part["tokens"][None], part["position_ids"][None], None)[0]
                    losses = functional.cross_entropy(logits.float(), part["labels"], reduction="none")
                    total += float((losses * part["loss_mask"]).sum())
                    tokens += float(part["loss_mask"].sum())
        plain = total / tokens
    recorder = small_training.train(run, checkpoints=manager)
    return ([] if recorder is None else recorder.losses), plain


@pytest.mark.torch
def test_a_resumed_training_is_the_same_to_the_last_bit(
    chats: pathlib.Path, run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    """The loss is the mean over answers in plain torch (1e-5), on two replicas (1e-4), and after a resume (equal)."""
    flags, save = flags_of(chats), tmp_path / "save"
    ((whole, plain),) = run_ranks(1, trained, f"{flags} --save {save} --save-interval 2")
    assert whole[0] == pytest.approx(plain, rel=1e-5)
    assert whole[-1] < whole[0]
    shutil.rmtree(save / "iter_0000004")
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    ((resumed, _),) = run_ranks(1, trained, f"{flags} --save {save}")
    assert resumed == whole[2:]
    together = run_ranks(2, trained, f"{flags} --save {tmp_path}/other --calculate-per-token-loss")
    assert together[0][0][0] == pytest.approx(plain, rel=1e-4)


LINES = {
    "no JSON": ("{", "is not valid JSON"),
    "no messages": ('{"text": "a"}', "has no messages"),
    "no role": ('{"messages": [{"content": "a"}]}', "must be an object with a role"),
    "no answer": ('{"messages": [{"role": "user", "content": "a"}]}', "without a message of the role assistant"),
    "no content": ('{"messages": [{"role": "user"}, {"role": "assistant"}]}', "message 1 has no content"),
    "no answer in the first of two conversations": (
        '{"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, '
        '{"role": "assistant", "content": "c"}]}',
        "line 1 has a conversation of the roles system without",
    ),
    "nothing": ("\n", "holds no conversation"),
}


@pytest.mark.parametrize("case", LINES)
def test_wrong_lines_are_named(case: str, tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.data.sft.conversations import check_conversations

    text, message = LINES[case]
    (tmp_path / "chats.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        check_conversations(str(tmp_path / "chats.jsonl"))


def test_system_messages_begin_conversations(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.data.sft.conversations import read_conversations

    draw = random.Random(1)
    both = [conversation(draw, 1), conversation(draw, 2)]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [*both[0], *both[1]]}))
    assert [messages for _, messages in read_conversations(str(tmp_path / "chats.jsonl"))] == both


def test_a_wrong_template_or_conversation_is_named(chats: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.data.sft.answers import AnswerTokenizer
    from megatronapp_trainer.data.sft.store import open_store

    template, path = tmp_path / "chat.jinja", tmp_path / "chats.jsonl"
    template.write_text("{% for message in messages %}")
    with pytest.raises(DataError, match="no template that Jinja can compile: line 1: "):
        AnswerTokenizer(data_config(chats), str(template))
    template.write_text("{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
    lines = [
        {"messages": [{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}]}
        for role in ("user", "tool")
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError, match="line 2: the chat template refuses a conversation: no tools"):
        open_store(str(path), AnswerTokenizer(data_config(chats), str(template)), None)


def test_what_another_builder_left_is_not_written_through(chats: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another training may have mapped a file that is in the cache already."""
    from megatronapp_trainer.data.sft.answers import AnswerTokenizer
    from megatronapp_trainer.data.sft.store import open_store

    tokenizer = AnswerTokenizer(data_config(chats), "default")
    first = open_store(str(chats / "chats.jsonl"), tokenizer, str(tmp_path))
    ((cache,),) = [[*tmp_path.iterdir()]]
    stat = (cache / "tokens.bin").stat()
    (cache / "bounds.npy").unlink()
    again = open_store(str(chats / "chats.jsonl"), tokenizer, str(tmp_path))
    assert (cache / "tokens.bin").stat().st_ino != stat.st_ino, "a file in its place"
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.bounds.tolist() == first.bounds.tolist()


def test_templates_that_rewrite_messages_are_refused(chats: pathlib.Path) -> None:
    from megatronapp_trainer.data.chat_template import ChatTemplate
    from megatronapp_trainer.data.sft.answers import render, template_of

    last_only = ChatTemplate(text="{{ messages[-1]['content'] }}")
    with pytest.raises(DataError, match="renders message 3 of a conversation in another way"):
        render(conversation(random.Random(4), 2), last_only)
    refusing = ChatTemplate(text="{{ raise_exception('no system messages') }}")
    with pytest.raises(DataError, match="no system messages"):
        render(conversation(random.Random(4), 2), refusing)
    with pytest.raises(DataError, match="the path of a Jinja template"):
        template_of("/nowhere.jinja", data_config(chats))


REFUSALS = {
    "--sft": "--sft needs the tokenizer",
    "--sft --tokenizer-file t --data-path 1 a 2 b": "--data-path has weights",
    "--sft --tokenizer-file t --eod-mask-loss": "--eod-mask-loss cannot be combined with --sft",
    "--sft --tokenizer-file t --sft-tokenizer-prompt-format nemotron-h-aligned": "is not known",
    "--sft-tokenizer-prompt-format identity": "needs --sft",
    "--tokenizer-file t --tokenizer-type SFTTokenizer": "is for --sft",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_flags_that_exclude_conversations_are_refused(flags: str) -> None:
    from megatronapp_trainer.config import parse

    needed = FLAGS.removesuffix(" --sft") + " --vocab-size 8 --data-path a"
    with pytest.raises(UsageError, match=REFUSALS[flags]):
        parse(f"{needed} {flags}".split())


def test_tools_are_refused(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.data.sft.conversations import read_conversations

    messages = [{"role": "user", "content": "river"}, {"role": "assistant", "content": "king"}]
    lines = [json.dumps({"messages": messages, "tools": tools}) for tools in ([], None, [{"type": "function"}])]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    found = read_conversations(str(tmp_path / "chats.jsonl"))
    assert [number for number, _ in (next(found), next(found))] == [1, 2]
    with pytest.raises(DataError, match='line 3 has "tools", which --sft does not give to the chat template'):
        next(found)
