"""Options of Megatron's converters, as existing scripts use them, and their meaning here.

Accepted are those of ``tools/checkpoint/convert.py`` and of the older two-step conversion of GPT-2, with the values
that have a meaning. The others are refused with the reason and the command to use.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from megatronapp_trainer.checkpoint.convert.options import HF, MEGATRON, OURS
from megatronapp_trainer.errors import UsageError

COMMAND: Final = "megatronapp checkpoint convert"
ANY: Final = "*"
"""Key of all values of a spelling that are not named."""


@dataclasses.dataclass(frozen=True, slots=True)
class LegacyOption:
    """One option of theirs. Exactly one of the last four fields defines its meaning."""

    flag: str
    takes: str | None = None
    """Name of its value; None for a switch."""
    means: str | tuple[str, ...] | None = None
    """Our option that takes the value; for a switch our arguments."""
    values: Mapping[str, tuple[str, ...] | str] | None = None
    """Meaning of each value: our arguments, or why it is not supported."""
    answer: str | None = None
    """Why it is not supported here: the command ends."""
    notice: str | None = None
    """Why it is not needed here: the command runs and prints this."""


_LEGACY = (
    "Megatron's legacy layout (mp_rank_XX) is read but not written, and no step needs it: what one conversion writes "
    "is trained and served with unchanged"
)
_FROM_HF, _FROM_MEGATRON, _TO_OURS = ("--from", HF), ("--from", MEGATRON), ("--to", OURS)
_ANY_LAYOUT = "the files do not depend on the layout; it is chosen when the model is trained or served"
_IMPLEMENTATION = (
    "the weights are the same for all layers; --transformer-impl is chosen when the model is trained or served"
)

SPELLINGS: Final = (
    LegacyOption(
        "--model-type",
        "TYPE",
        values={
            "GPT": (),
            "BERT": "models of transformers normalise after each layer, which no model of this trainer does; only GPT",
        },
    ),
    LegacyOption(
        "--loader",
        "NAME",
        values={
            "llama_mistral": _FROM_HF,
            "core": _FROM_MEGATRON,
            "mcore": _FROM_MEGATRON,
            "legacy": _FROM_MEGATRON,
            "megatron": _FROM_MEGATRON,
            "mixtral_hf": _FROM_HF,
        },
    ),
    LegacyOption(
        "--saver", "NAME", values={"core": _TO_OURS, "mcore": _TO_OURS, "legacy": _LEGACY, "megatron": _LEGACY}
    ),
    LegacyOption("--load_path", "DIR", means="--load-dir"),
    LegacyOption("--save_path", "DIR", means="--save-dir"),
    LegacyOption(
        "--checkpoint-type",
        "TYPE",
        values={
            "hf": _FROM_HF,
            "meta": "only the Hugging Face format is read; get the model's folder with config.json and *.safetensors",
        },
    ),
    LegacyOption(
        "--model-size",
        "NAME",
        values={
            **{
                name: ("--family", "llama")
                for name in (
                    *("llama2-7B", "llama2-13B", "llama2-70B", "llama2-7Bf", "llama2-13Bf", "llama2-70Bf"),
                    *("llama3", "llama3-8B", "llama3-70B", "yi-34B"),
                )
            },
            "mistral": ("--family", "mistral"),
            "mistral-7B": ("--family", "mistral"),
            "qwen2.5": ("--family", "qwen2"),
        },
    ),
    LegacyOption("--bf16", means=("--dtype", "bf16")),
    LegacyOption("--fp16", means=("--dtype", "fp16")),
    LegacyOption("--target_params_dtype", "TYPE", means="--dtype"),
    LegacyOption("--target_tensor_model_parallel_size", "N", means="--target-tensor-parallel-size"),
    LegacyOption("--target_pipeline_model_parallel_size", "N", means="--target-pipeline-parallel-size"),
    LegacyOption(
        "--target-expert-parallel-size",
        "N",
        notice=_ANY_LAYOUT,
    ),
    LegacyOption("--target_data_parallel_size", "N", notice=_ANY_LAYOUT),
    LegacyOption("--make_vocab_size_divisible_by", "N", means="--make-vocab-size-divisible-by"),
    LegacyOption("--max_shard_size", "SIZE", means="--max-shard-size"),
    LegacyOption("--convert_checkpoint_from_megatron_to_transformers", means=("--to", HF)),
    LegacyOption("--megatron-path", "DIR", notice="megatron-core is installed with the trainer; no sources are needed"),
    LegacyOption("--max-queue-size", "N", notice="one process reads and writes; nothing is queued"),
    LegacyOption("--no-checking", notice="names and sizes of all tensors are always checked, which costs no time"),
    LegacyOption("--loader-transformer-impl", "NAME", notice=_IMPLEMENTATION),
    LegacyOption("--saver-transformer-impl", "NAME", notice=_IMPLEMENTATION),
    LegacyOption("--use_distributed_optimizer", notice="weights alone are converted; the optimizer starts afresh"),
    LegacyOption(
        "--print-checkpoint-structure", notice="the manifest megatronapp.json lists what a checkpoint contains"
    ),
    LegacyOption(
        "--tokenizer_name",
        "NAME",
        answer="nothing is downloaded; a tokenizer next to the weights is copied, another by --tokenizer-model PATH",
    ),
    LegacyOption("--vocab-file", "FILE", means="--tokenizer-model"),
    LegacyOption("--merge-file", "FILE", means="--tokenizer-model"),
)


def translate_option(spelling: LegacyOption, value: str | None) -> list[str]:
    """Translate an option to our arguments.

    Raises UsageError with the reason if it has no meaning.
    """
    if spelling.notice is not None:
        return []
    if spelling.answer is not None:
        raise UsageError(f"{spelling.flag}: {spelling.answer}; omit it")
    if isinstance(spelling.means, tuple):
        return list(spelling.means)
    if spelling.means is not None:
        return [spelling.means, str(value)]
    values = spelling.values or {}
    meant = values.get(str(value), values.get(ANY))
    if meant is None:
        raise UsageError(f"{spelling.flag} {value}: known are {', '.join(values)}; omit it where none fits")
    if isinstance(meant, str):
        raise UsageError(f"{spelling.flag} {value}: {meant}; omit it")
    return list(meant)


def translate(
    given: Sequence[tuple[LegacyOption, str | None]], report: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Translate all given options to our arguments; `report` receives why others are not needed.

    Raises UsageError.
    """
    translated: list[str] = []
    reasons: list[str] = []
    for spelling, value in given:
        try:
            translated += translate_option(spelling, value)
            if spelling.notice is not None:
                report(f"{spelling.flag}: {spelling.notice}")
        except UsageError as error:
            reasons.append(str(error))
    if reasons:
        raise UsageError("\n".join(reasons))
    return translated
