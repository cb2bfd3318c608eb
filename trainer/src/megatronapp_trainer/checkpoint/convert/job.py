"""A conversion from beginning to end: inspect, refuse what cannot be converted, write a temporary folder, rename it."""

import pathlib
from collections.abc import Callable

from megatronapp_trainer.checkpoint.arguments import holds_weights_alone
from megatronapp_trainer.checkpoint.convert.from_megatron import notes, open_megatron, open_ours, write_weights
from megatronapp_trainer.checkpoint.convert.huggingface.companions import (
    check_tokenizer,
    is_written_by_us,
    tokenizer_note,
)
from megatronapp_trainer.checkpoint.convert.huggingface.folder import is_hf_folder
from megatronapp_trainer.checkpoint.convert.huggingface.load import open_source, write_ours
from megatronapp_trainer.checkpoint.convert.huggingface.save import find_checkpoint, open_stored, write_hf
from megatronapp_trainer.checkpoint.convert.options import HF, MEGATRON, OURS, ConversionOptions, ConversionSummary
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.checkpoint.convert.target import whole_folder
from megatronapp_trainer.checkpoint.directory import (
    MANIFEST,
    OWNER,
    BrokenCheckpointError,
    CheckpointDirectory,
    read_manifest,
)
from megatronapp_trainer.checkpoint.foreign import CONVERT, megatron_checkpoint
from megatronapp_trainer.errors import CheckpointError, UsageError


def convert(options: ConversionOptions, report: Callable[[str], None] = lambda _: None) -> ConversionSummary:
    """Convert in the direction that options and folder give; `report` receives notices before anything is written.

    Raises:
        UsageError: the options do not fit each other, the model, or the content of `save_dir`.
        CheckpointError: the source cannot be converted; the text names the key or tensor.
        StorageError: the target could not be written; its old content stays.
    """
    source = _source_kind(options)
    _check_direction(source, options)
    check_tokenizer(options.tokenizer)
    if source == HF:
        return _from_hf(options, report)
    if source == MEGATRON or options.to == OURS:
        return _to_weights(source, options, report)
    return _to_hf(options, report)


def _from_hf(options: ConversionOptions, report: Callable[[str], None]) -> ConversionSummary:
    source = open_source(options.load_dir, options.divisible_by)
    if options.family not in (None, source.family.model_type):
        raise UsageError(f"{options.load_dir} is a {source.family.model_type} model, not {options.family}")
    _check_requested_options(source.shape, options)
    if options.tokenizer is None and (note := tokenizer_note(options.load_dir)) is not None:
        report(note)
    with whole_folder(options.save_dir, overwrite=options.overwrite, replaceable=_was_converted) as folder:
        return write_ours(source, options, folder)


def _to_weights(kind: str, options: ConversionOptions, report: Callable[[str], None]) -> ConversionSummary:
    """Convert weights of Megatron-LM or of ours, without the rest of a training."""
    if options.family is not None:
        raise UsageError("--family is for models of Hugging Face; omit it")
    if kind == MEGATRON:
        source = open_megatron(options.load_dir, options.iteration, options.true_vocab_size)
    else:
        source = open_ours(options.load_dir, options.iteration, report)
    _check_requested_options(source.with_padding(options.divisible_by), options)
    for note in notes(source, options):
        report(note)
    with whole_folder(options.save_dir, overwrite=options.overwrite, replaceable=_was_converted) as folder:
        return write_weights(source, options, folder)


def _to_hf(options: ConversionOptions, report: Callable[[str], None]) -> ConversionSummary:
    path, manifest = find_checkpoint(options.load_dir, options.iteration, report)
    stored = open_stored(path, manifest, options.family)
    _check_requested_options(stored.shape, options)
    with whole_folder(options.save_dir, overwrite=options.overwrite, replaceable=is_written_by_us) as folder:
        return write_hf(stored, options, folder)


def _source_kind(options: ConversionOptions) -> str:
    """Return the kind of content of `load_dir`.

    Raises UsageError if it is not the requested kind, CheckpointError if it is unknown.
    """
    path = options.load_dir
    if not path.is_dir():
        raise CheckpointError(f"--load-dir {path} is not a folder; check the path")
    if is_hf_folder(path):
        found = HF
    elif _holds_ours(path):
        found = OURS
    elif megatron_checkpoint(path) is not None:
        found = MEGATRON
    elif CheckpointDirectory(path).checkpoints():
        found = OURS
    else:
        raise CheckpointError(
            f"--load-dir {path} holds neither config.json of a Hugging Face model, nor iter_... of this trainer or of "
            "Megatron-LM (torch_dist, or mp_rank_...)"
        )
    if options.source == MEGATRON and found == OURS:
        return found
    if options.source not in (None, found):
        raise UsageError(f"--load-dir {path} holds {_describe_kind(found)}, not {_describe_kind(str(options.source))}")
    return found


def _holds_ours(path: pathlib.Path) -> bool:
    return any((folder / MANIFEST).is_file() for folder in (path, *CheckpointDirectory(path).checkpoints()))


def _describe_kind(kind: str) -> str:
    return {HF: "a Hugging Face model", MEGATRON: "checkpoints of Megatron-LM"}.get(kind, "checkpoints of this trainer")


def _check_direction(source: str, options: ConversionOptions) -> None:
    if options.to == HF and source == MEGATRON:
        between = options.save_dir.with_name(f"{options.save_dir.name}-megatronapp")
        raise UsageError(
            f"{options.load_dir} holds checkpoints of Megatron-LM, which become ours first: "
            f"{CONVERT} --load-dir {options.load_dir} --save-dir {between}; "
            f"then {CONVERT} --load-dir {between} --save-dir {options.save_dir}"
        )
    if options.to == source == HF:
        raise UsageError(f"{options.load_dir} is a Hugging Face folder already; omit --to {HF} to convert from it")


def _check_requested_options(shape: ModelShape, options: ConversionOptions) -> None:
    """Raise UsageError if the model has other positions, or cannot be split as requested."""
    model = shape.model
    if options.positions not in (None, model.position_embedding_type):
        raise UsageError(
            f"--position-embedding-type {options.positions}: this one has {model.position_embedding_type}; omit it"
        )
    tensor, pipeline = options.tensor_size, options.pipeline_size
    sizes = {
        "query heads": (model.num_attention_heads, tensor),
        "rows of query, key and value": (shape.queries + 2 * shape.keys, tensor),
        "channels of the MLP": (model.mlp_width, tensor),
        "rows of the padded vocabulary": (shape.padded_vocab_size, tensor),
        "layers": (model.num_layers, pipeline),
    }
    if model.heads_of_keys % tensor and tensor % model.heads_of_keys:
        raise UsageError(
            f"this model's {model.heads_of_keys} key heads cannot be split over {tensor} ranks; take a divisor of "
            f"{model.heads_of_keys}, or a multiple: then several ranks share a key head"
        )
    for what, (size, parts) in sizes.items():
        if size % parts:
            raise UsageError(f"this model's {size} {what} cannot be split over {parts} ranks; take a divisor of {size}")


def _was_converted(folder: pathlib.Path) -> bool:
    """Return True if a folder has only a converted checkpoint: no training has written here."""
    checkpoints = CheckpointDirectory(folder).checkpoints()
    if not checkpoints or (folder / OWNER).exists():
        return False
    try:
        return all(holds_weights_alone(read_manifest(path).arguments) for path in checkpoints)
    except BrokenCheckpointError:
        return False
