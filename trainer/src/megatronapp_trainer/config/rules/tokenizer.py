"""Rules for the flags of the tokenizer."""

from collections.abc import Iterator

from megatronapp_trainer.config.data import WORDPIECE_TYPES
from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig

_TYPES = {
    "GPT2BPETokenizer": ("--vocab-file", "--tokenizer-file"),
    "HuggingFaceTokenizer": ("--tokenizer-file",),
    "SFTTokenizer": ("--tokenizer-file",),
    **dict.fromkeys(WORDPIECE_TYPES, ("--vocab-file",)),
}
"""Values of --tokenizer-type, and the files of which each can be made."""
_NO_SUCH_TYPE = "give --tokenizer-file tokenizer.json, or --vocab-file and --merge-file of a GPT-2 BPE"
_ADVICE = {
    "NullTokenizer": "Megatron adds one token to its --vocab-size N: omit the type, and give --vocab-size N + 1",
}


def tokenizer_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    data = config.data
    yield from require(
        data.is_wordpiece or (data.vocab_file is None) == (data.merge_file is None),
        "--vocab-file and --merge-file belong together; a vocab.txt of WordPiece needs --tokenizer-type "
        f"{' or '.join(WORDPIECE_TYPES)}",
    )
    kind = data.tokenizer_type
    if kind is None:
        return
    if not (
        yield from require(
            kind in _TYPES, f"--tokenizer-type {kind} is not supported; {_ADVICE.get(kind, _NO_SUCH_TYPE)}"
        )
    ):
        return
    yield from require(
        kind != "SFTTokenizer" or data.sft, "--tokenizer-type SFTTokenizer is for --sft; add it, or omit the type"
    )
    needed, given = _TYPES[kind], {data.tokenizer_file: "--tokenizer-file", data.vocab_file: "--vocab-file"}
    found = [flag for value, flag in given.items() if value is not None]
    yield from require(
        not found or bool(set(found) & set(needed)),
        f"--tokenizer-type {kind} and {' '.join(found)} exclude each other; omit the type: the files determine it",
    )
    yield from require(
        not data.is_wordpiece or data.merge_file is None,
        f"--merge-file: --tokenizer-type {kind} has only --vocab-file vocab.txt; leave --merge-file out",
    )
