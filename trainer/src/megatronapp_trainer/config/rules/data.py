"""Rules for the flags of training and validation data."""

import re
from collections.abc import Iterator

from megatronapp_trainer.config.data import DataConfig
from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig


def _paths(config: TrainerConfig) -> Iterator[str]:
    data = config.data
    split_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    paths = data.data_path is not None or any(path is not None for path in split_paths)
    yield from require(
        data.mock_data or paths or data.hf_dataset is not None,
        "no training data: give --data-path PREFIX (see `megatronapp data prepare`) or --mock-data",
    )
    yield from require(not (data.mock_data and paths), "--mock-data and a data path exclude each other")
    yield from require(not data.mock_data or data.vocab_size is not None, "--mock-data needs --vocab-size")
    for flag, on in (
        ("--reset-attention-mask", data.reset_attention_mask),
        ("--reset-position-ids", data.reset_position_ids),
    ):
        yield from require(
            not (data.mock_data and on), f"{flag}: samples of --mock-data hold no documents; leave it out"
        )
    yield from require(
        data.data_path is None or not any(path is not None for path in split_paths),
        "give --data-path with --split, or the three of --train-data-path, --valid-data-path and --test-data-path",
    )


def _validation(config: TrainerConfig) -> Iterator[str]:
    """Check the flags of evaluations on all samples, and on several sets."""
    data, logging = config.data, config.logging
    given = {
        "--full-validation": logging.full_validation,
        "--multiple-validation-sets": logging.multiple_validation_sets,
        "--log-loss-per-source": logging.log_loss_per_source,
    }
    for flag, on in given.items():
        yield from require(not (on and data.mock_data), f"{flag}: --mock-data has no files; leave it out")
        yield from require(not on or config.model.type == "gpt", f"{flag} is for --model-type gpt only; leave it out")
        yield from require(
            not (on and config.fbd.enabled),
            f"{flag} cannot be combined with --forward-backward-disaggregating yet; leave it out",
        )
    yield from require(
        not (logging.multiple_validation_sets and data.valid_data_path is None and not data.mock_data),
        "--multiple-validation-sets needs --valid-data-path with the prefixes of the sets",
    )
    if logging.multiple_validation_sets:
        weights = [value for value in data.valid_data_path or () if _is_number(value)]
        yield from require(
            not weights,
            f"--multiple-validation-sets takes --valid-data-path without weights; leave {' '.join(weights)} out",
        )
    if logging.full_validation and not logging.multiple_validation_sets:
        yield from require(
            not any(_is_number(value) for value in data.valid_data_path or data.data_path or ()),
            "--full-validation reads each sample once, so weights mean nothing: give --valid-data-path without weights",
        )
    yield from require(
        not logging.full_validation or logging.eval_iters > 0,
        "--full-validation and --eval-iters 0, which turns evaluations off, exclude each other; leave one out",
    )


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _validation_names(config: TrainerConfig) -> Iterator[str]:
    logging, paths = config.logging, config.data.valid_data_path or ()
    names = logging.validation_set_names
    if names is None:
        return
    yield from require(
        logging.multiple_validation_sets, "--validation-set-names needs --multiple-validation-sets; leave it out"
    )
    yield from require(
        not logging.multiple_validation_sets or len(names) == len(paths),
        f"--validation-set-names has {len(names)} names for the {len(paths)} prefixes of --valid-data-path",
    )
    yield from require(len(set(names)) == len(names), "--validation-set-names: each name may be given only once")


def _conversations(config: TrainerConfig) -> Iterator[str]:
    """Check the flags of supervised fine-tuning."""
    data = config.data
    yield from require(
        data.sft or data.sft_tokenizer_prompt_format == DataConfig().sft_tokenizer_prompt_format,
        "--sft-tokenizer-prompt-format needs --sft",
    )
    if not data.sft:
        return
    for flag, on in (
        ("--mock-data", data.mock_data),
        ("--eod-mask-loss", data.eod_mask_loss),
        ("--log-loss-per-source", config.logging.log_loss_per_source),
        (f"--model-type {config.model.type}", config.model.type != "gpt"),
        (f"--tokenizer-type {data.tokenizer_type}", data.is_wordpiece),
    ):
        yield from require(not on, f"{flag} cannot be combined with --sft; leave one of them out")
    yield from require(
        data.tokenizer_file is not None or data.vocab_file is not None,
        "--sft needs the tokenizer, because it reads text: give --tokenizer-file",
    )
    for flag in ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"):
        values = getattr(data, flag[2:].replace("-", "_")) or ()
        yield from require(
            not any(_is_number(value) for value in values),
            f"{flag} has weights, which --sft does not take: an epoch has each conversation once; leave them out",
        )
    named = re.fullmatch(r"[\w-]+", data.sft_tokenizer_prompt_format) is not None
    yield from require(
        not named or data.sft_tokenizer_prompt_format in {"default", "identity"},
        f"--sft-tokenizer-prompt-format {data.sft_tokenizer_prompt_format} is not known; write default, identity, or "
        "the path of a Jinja template, such as FILE.jinja",
    )


def _streams(config: TrainerConfig) -> Iterator[str]:
    """Check the flags of streamed data sets."""
    data, plain = config.data, DataConfig()
    for name in ("hf_valid_dataset", "hf_split", "hf_text_field", "hf_readers"):
        given = getattr(data, name) != getattr(plain, name)
        yield from require(
            data.hf_dataset is not None or not given, f"--{name.replace('_', '-')} needs --hf-dataset; leave it out"
        )
    if data.hf_dataset is None:
        return
    paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    logging, training = config.logging, config.training
    for flag, on in (
        ("a data path", any(getattr(data, path) is not None for path in paths)),
        ("--mock-data", data.mock_data),
        ("--sft", data.sft),
        ("--full-validation", logging.full_validation),
        ("--multiple-validation-sets", logging.multiple_validation_sets),
        ("--log-loss-per-source", logging.log_loss_per_source),
        ("--forward-backward-disaggregating", config.fbd.enabled),
        (f"--model-type {config.model.type}", config.model.type != "gpt"),
    ):
        yield from require(not on, f"{flag} cannot be combined with --hf-dataset; leave one of them out")
    yield from require(
        data.tokenizer_file is not None or data.vocab_file is not None,
        "--hf-dataset needs the tokenizer, because it reads text: give --tokenizer-file",
    )
    yield from require(
        data.hf_readers is None
        or training.global_batch_size is None
        or training.global_batch_size // max(training.micro_batch_size, 1) % data.hf_readers == 0,
        f"--hf-readers {data.hf_readers} must divide the microbatches of --global-batch-size "
        f"{training.global_batch_size}, so that each step reads from all of them",
    )


DATA_RULES = (_conversations, _streams, _paths, _validation, _validation_names)
