"""Commands and options of MegatronApp's text-generation server and page, and their counterparts here.

Users have them in scripts. Each option is accepted (under our name, passed to the trainer, or as the default), accepted
with a note about where it belongs now, or rejected with the command to use. docs/serving.md has this table.
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
    """One option of the original server. Exactly one of the last five fields is set."""

    flag: str
    takes: str | None = None
    """Name of its value; None for a switch."""
    means: str | None = None
    """Our option that takes the value."""
    passed: bool = False
    """True if the trainer has an option of this name."""
    always: str | None = None
    """Why the option changes nothing: it is always done."""
    belongs: str | None = None
    """New place of the option; it is accepted with this note."""
    answer: str | None = None
    """Replacement of the option, which is rejected with this note."""


@dataclasses.dataclass(frozen=True, slots=True)
class LegacyCommand:
    """One command of the original server."""

    theirs: str
    ours: tuple[str, ...]
    """Arguments after `megatronapp`; empty: nothing is needed."""
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
        "one server answers programs, and the pages next to it show the model",
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
    ("--qk-layernorm", None),
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
    ("--fp16", None),
    ("--no-masked-softmax-fusion", None),
    ("--use-mcore-models", None),
)
_PER_REQUEST = "belongs to a request now; set it there"

SPELLINGS: Final = (
    *(LegacyOption(flag, takes, passed=True) for flag, takes in _SHAPE),
    LegacyOption("--enable-ws-server", always="the pages are served next to the API (--no-pages turns them off)"),
    LegacyOption("--use-rotary-position-embeddings", always="the checkpoint has the kind of positions of its model"),
    LegacyOption("--no-position-embedding", always="the checkpoint has the kind of positions of its model"),
    LegacyOption("--return-log-probs", always="a request with logprobs gets them"),
    LegacyOption("--use-checkpoint-args", always="the checkpoint has the shape of its model"),
    LegacyOption("--micro-batch-size", "N", always="any number of prompts of any length are batched"),
    LegacyOption("--no-load-optim", always="only weights are read"),
    LegacyOption("--no-load-rng", always="only weights are read"),
    LegacyOption("--use-flash-attn", always="the fastest kernel of the device is used"),
    LegacyOption("--flash-decode", always="the fastest kernel of the device is used"),
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
        "--tokenizer-type", "TYPE", belongs="follows from the files: --tokenizer-file, or --vocab-file and --merge-file"
    ),
    LegacyOption(
        "--max-tokens-to-oom",
        "N",
        belongs="memory is checked at the start; limit it by --max-batch-size and --max-length",
    ),
    LegacyOption(
        "--rotary-seq-len-interpolation-factor",
        "N",
        answer="rotary positions are not interpolated; a model for long contexts has --use-rope-scaling: omit it",
    ),
    LegacyOption(
        "--exit-duration-in-mins",
        "N",
        answer="a server runs until its job is deleted; a manifest can limit its time: add "
        "spec.runPolicy.activeDeadlineSeconds to what megatronapp serve --load CHECKPOINT --manifest prints",
    ),
    LegacyOption("--prompts", "TEXT", answer=f"prompts are sent to the server: {ACCESS}; {ASK}"),
    LegacyOption(
        "--sequence-parallel",
        answer="checkpoints that were trained with it are served without it: omit it",
    ),
    LegacyOption(
        "--training-ws-port",
        "PORT",
        answer="a training is controlled by its own job: megatronapp run FILE with spec.analyzer.enabled and "
        "spec.scope.training.startPaused, then megatronapp ui JOB",
    ),
    LegacyOption(
        "--context-parallel-size", "N", answer="one rank holds a whole sequence: omit it, or raise the tensor size"
    ),
    LegacyOption("--expert-model-parallel-size", "N", answer="models with experts are not served yet: omit it"),
)


def add_spellings(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `megatronapp serve`; its help lists only our names."""
    parser.set_defaults(passed=())
    for option in SPELLINGS:
        if option.means is not None:
            _add_alias(parser, option.flag, option.means)
        else:
            nargs = 0 if option.takes is None else None
            parser.add_argument(
                option.flag,
                action=_LegacyOptionAction,
                nargs=nargs,
                spelling=option,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def _add_alias(parser: argparse.ArgumentParser, flag: str, ours: str) -> None:
    meant: Any = parser._option_string_actions[ours]
    parser.add_argument(flag, dest=meant.dest, type=meant.type, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _LegacyOptionAction(argparse.Action):
    """Pass an option to the trainer, print a note, or reject it."""

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
        option, value = self.spelling, [values] if isinstance(values, str) else []
        if option.answer is not None:
            parser.error(f"{option.flag}: {option.answer}")
        if option.passed:
            namespace.passed = (*namespace.passed, option.flag, *value)
        elif option.belongs is not None:
            print(f"note: {' '.join([option.flag, *value])}: {option.belongs}", file=sys.stderr)


def table() -> str:
    """Return commands and options as a Markdown table, for the documentation."""
    lines = ["| theirs | here |", "|---|---|"]
    lines += [f"| `{command.theirs}` | {_ours(command)}{command.why} |" for command in COMMANDS]
    lines += ["", "| option | here |", "|---|---|"]
    lines += [
        f"| `{option.flag}{'' if option.takes is None else f' {option.takes}'}` | {meaning(option)} |"
        for option in SPELLINGS
    ]
    return "\n".join(line.replace("\\|", "|") for line in lines) + "\n"


def _ours(command: LegacyCommand) -> str:
    return f"`megatronapp {' '.join(command.ours)}`: " if command.ours else ""


def meaning(option: LegacyOption) -> str:
    """Return the meaning of an option as text."""
    kinds: Mapping[str, str | None] = {
        f"`{option.means}`": option.means,
        "the same, by the trainer": "passed" if option.passed else None,
        f"runs; {option.always}": option.always,
        f"runs; {option.belongs}": option.belongs,
        f"refused; {option.answer}": option.answer,
    }
    (found,) = (words for words, given in kinds.items() if given is not None)
    return found
