"""Commands and options of MegatronApp's text-generation server and its page, and what they mean here.

They stand in people's scripts. Each option either runs (under our name, handed on to the trainer, or as what is done
anyway), or runs with a word about where it belongs now, or is refused with the command to use. docs/serving.md shows
this table.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

ASK: Final = """curl $OPENAI_BASE_URL/completions -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: \
application/json' -d '{"prompt": "Once", "max_tokens": 32}'"""
ACCESS: Final = 'eval "$(megatronapp serve --print serve)"'


@dataclasses.dataclass(frozen=True, slots=True)
class LegacyOption:
    """One option of theirs. Exactly one of the last five says what it means."""

    flag: str
    takes: str | None = None
    """What its value is called; None for a switch."""
    means: str | None = None
    """Our option that takes the value."""
    passed: bool = False
    """The trainer knows it under this name."""
    always: str | None = None
    """Done anyway: why."""
    belongs: str | None = None
    """Taken and told of: where it belongs now."""
    answer: str | None = None
    """Refused: what to use."""


@dataclasses.dataclass(frozen=True, slots=True)
class LegacyCommand:
    """A command of theirs as a whole."""

    theirs: str
    ours: tuple[str, ...]
    """Words behind `megatronapp`; empty: nothing is needed."""
    why: str


COMMANDS: Final = (
    LegacyCommand(
        "torchrun --nproc_per_node N tools/run_text_generation_server.py OPTIONS",
        ("serve", "--load", "CHECKPOINT"),
        "the ranks are started and supervised; the layout follows from the two sizes of parallel groups",
    ),
    LegacyCommand(
        "python tools/run_text_generation_server.py --enable-ws-server OPTIONS",
        ("serve", "--load", "CHECKPOINT"),
        "one server answers programs, and the pages beside it show the model",
    ),
    LegacyCommand(
        "tools/text_generation_cli.py HOST:PORT",
        ("serve", "--print", "serve"),
        f"prints address and key for a shell; then {ASK}",
    ),
    LegacyCommand(
        "curl -X PUT http://HOST:PORT/api", ("serve", "--print", "serve"), f"prints address and key; then {ASK}"
    ),
    LegacyCommand("npm install", (), "the page is built and served by the hub"),
    LegacyCommand("npm run dev", ("ui", "serve"), "opens the page of a job; no proxy, no second server"),
    LegacyCommand("npm run build", (), "the page is built and served by the hub"),
)

_SHAPE = (
    ("--num-layers", "N"),
    ("--hidden-size", "N"),
    ("--ffn-hidden-size", "N"),
    ("--num-attention-heads", "N"),
    ("--kv-channels", "N"),
    ("--group-query-attention", None),
    ("--num-query-groups", "N"),
    ("--seq-length", "N"),
    ("--max-position-embeddings", "N"),
    ("--position-embedding-type", "KIND"),
    ("--rotary-base", "N"),
    ("--rotary-percent", "SHARE"),
    ("--use-rope-scaling", None),
    ("--normalization", "NORM"),
    ("--norm-epsilon", "VALUE"),
    ("--swiglu", None),
    ("--disable-bias-linear", None),
    ("--add-qkv-bias", None),
    ("--untie-embeddings-and-output-weights", None),
    ("--make-vocab-size-divisible-by", "N"),
    ("--transformer-impl", "LAYERS"),
    ("--attention-softmax-in-fp32", None),
    ("--attention-dropout", "SHARE"),
    ("--hidden-dropout", "SHARE"),
    ("--distributed-timeout-minutes", "N"),
    ("--bf16", None),
    ("--no-masked-softmax-fusion", None),
    ("--use-mcore-models", None),
)
_PER_REQUEST = "belongs to a request now; say it there"

SPELLINGS: Final = (
    *(LegacyOption(flag, takes, passed=True) for flag, takes in _SHAPE),
    LegacyOption("--enable-ws-server", always="the pages are served beside the API (--no-pages: not)"),
    LegacyOption("--use-rotary-position-embeddings", always="the checkpoint tells which positions its model has"),
    LegacyOption("--no-position-embedding", always="the checkpoint tells which positions its model has"),
    LegacyOption("--return-log-probs", always="a request that gives logprobs gets them"),
    LegacyOption("--use-checkpoint-args", always="the checkpoint tells the shape of its model"),
    LegacyOption("--micro-batch-size", "N", always="prompts of any number and length go together"),
    LegacyOption("--no-load-optim", always="only weights are read"),
    LegacyOption("--no-load-rng", always="only weights are read"),
    LegacyOption("--use-flash-attn", always="the fastest kernel that the device has is taken"),
    LegacyOption("--flash-decode", always="the fastest kernel that the device has is taken"),
    LegacyOption("--inference-max-seq-length", "N", means="--max-length"),
    LegacyOption("--inference-max-requests", "N", means="--max-batch-size"),
    LegacyOption("--inference-max-batch-size", "N", means="--max-batch-size"),
    LegacyOption("--tokenizer-model", "FILE", means="--tokenizer-file"),
    LegacyOption("--temperature", "T", belongs=f'{_PER_REQUEST}: "temperature"'),
    LegacyOption("--top_k", "K", belongs=f'{_PER_REQUEST}: "top_k"'),
    LegacyOption("--top_p", "P", belongs=f'{_PER_REQUEST}: "top_p"'),
    LegacyOption("--top-k", "K", belongs=f'{_PER_REQUEST}: "top_k"'),
    LegacyOption("--top-p", "P", belongs=f'{_PER_REQUEST}: "top_p"'),
    LegacyOption("--num-tokens-to-generate", "N", belongs=f'{_PER_REQUEST}: "max_tokens"'),
    LegacyOption("--seed", "N", belongs=f'{_PER_REQUEST}: "seed"'),
    LegacyOption(
        "--tokenizer-type", "TYPE", belongs="files tell it: --tokenizer-file, or --vocab-file and --merge-file"
    ),
    LegacyOption(
        "--max-tokens-to-oom", "N", belongs="memory is checked at the start; --max-batch-size and --max-length bound it"
    ),
    LegacyOption(
        "--rotary-seq-len-interpolation-factor",
        "N",
        answer="rotary positions are not interpolated; a model for long contexts has --use-rope-scaling: leave it out",
    ),
    LegacyOption(
        "--exit-duration-in-mins",
        "N",
        answer="a server runs until its job is deleted; a manifest bounds its time: add "
        "spec.runPolicy.activeDeadlineSeconds to what megatronapp serve --load CHECKPOINT --manifest prints",
    ),
    LegacyOption("--prompts", "TEXT", answer=f"prompts are sent to the server: {ACCESS}; {ASK}"),
    LegacyOption("--fp16", answer="weights are fp32 or bf16: give --precision bf16"),
    LegacyOption(
        "--sequence-parallel",
        answer="checkpoints that were trained with it are served without: leave it out",
    ),
    LegacyOption(
        "--training-ws-port",
        "PORT",
        answer="a training is watched by its own job: megatronapp run FILE with spec.analyzer.enabled, "
        "then megatronapp ui JOB",
    ),
    LegacyOption(
        "--context-parallel-size", "N", answer="one rank holds a whole sequence: leave it out, or raise the tensor size"
    ),
    LegacyOption("--expert-model-parallel-size", "N", answer="models of experts are not supported yet: leave it out"),
)


def add_spellings(parser: argparse.ArgumentParser) -> None:
    """Let the parser of `megatronapp serve` take them; its help lists our own names alone."""
    parser.set_defaults(passed=())
    for one in SPELLINGS:
        if one.means is not None:
            _add_alias(parser, one.flag, one.means)
        else:
            nargs = 0 if one.takes is None else None
            parser.add_argument(
                one.flag,
                action=_LegacyOptionAction,
                nargs=nargs,
                spelling=one,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def _add_alias(parser: argparse.ArgumentParser, flag: str, ours: str) -> None:
    meant: Any = parser._option_string_actions[ours]
    parser.add_argument(flag, dest=meant.dest, type=meant.type, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _LegacyOptionAction(argparse.Action):
    """Hands on, tells, or refuses, as the spelling says."""

    def __init__(self, *words: Any, spelling: LegacyOption, **keywords: Any) -> None:  # noqa: ANN401
        super().__init__(*words, **keywords)
        self.spelling = spelling

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Do so."""
        one, value = self.spelling, [values] if isinstance(values, str) else []
        if one.answer is not None:
            parser.error(f"{one.flag}: {one.answer}")
        if one.passed:
            namespace.passed = (*namespace.passed, one.flag, *value)
        elif one.belongs is not None:
            print(f"note: {' '.join([one.flag, *value])}: {one.belongs}", file=sys.stderr)


def table() -> str:
    """Commands and options as Markdown, for the documentation."""
    lines = ["| theirs | here |", "|---|---|"]
    lines += [f"| `{one.theirs}` | {_ours(one)}{one.why} |" for one in COMMANDS]
    lines += ["", "| option | here |", "|---|---|"]
    lines += [f"| `{one.flag}{'' if one.takes is None else f' {one.takes}'}` | {meaning(one)} |" for one in SPELLINGS]
    return "\n".join(line.replace("\\|", "|") for line in lines) + "\n"


def _ours(one: LegacyCommand) -> str:
    return f"`megatronapp {' '.join(one.ours)}`: " if one.ours else ""


def meaning(one: LegacyOption) -> str:
    """What an option means, in words."""
    kinds: Mapping[str, str | None] = {
        f"`{one.means}`": one.means,
        "the same, by the trainer": "passed" if one.passed else None,
        f"runs; {one.always}": one.always,
        f"runs; {one.belongs}": one.belongs,
        f"refused; {one.answer}": one.answer,
    }
    (found,) = (words for words, given in kinds.items() if given is not None)
    return found
