"""Conversion of a Hugging Face folder to a checkpoint of ours."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import torch

from megatronapp_common.names import CHECKPOINT_TRACKER
from megatronapp_trainer.checkpoint import arguments, tensor_files
from megatronapp_trainer.checkpoint.convert.dtypes import converted, name_of, precision_of, torch_dtype
from megatronapp_trainer.checkpoint.convert.families import HEAD, HuggingFaceFamily, family_of
from megatronapp_trainer.checkpoint.convert.families.config_keys import read_keys
from megatronapp_trainer.checkpoint.convert.huggingface.companions import (
    FolderOrigin,
    copy_companions,
    tokenizer_arguments,
)
from megatronapp_trainer.checkpoint.convert.huggingface.folder import CONFIG, TensorFolder
from megatronapp_trainer.checkpoint.convert.huggingface.special_tokens import text_tokens_of
from megatronapp_trainer.checkpoint.convert.options import OURS, ConversionOptions, ConversionSummary
from megatronapp_trainer.checkpoint.convert.rules import RuleApplication, steps
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.checkpoint.directory import Manifest, checkpoint_name, seal
from megatronapp_trainer.data.text_tokens import TextTokens
from megatronapp_trainer.errors import CheckpointError, DataError

_ITERATION = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceSource:
    """A Hugging Face folder that has all tensors, with the right sizes."""

    family: HuggingFaceFamily
    shape: ModelShape
    folder: TensorFolder
    origin: FolderOrigin
    steps: tuple[RuleApplication, ...]

    def dtype(self, step: RuleApplication) -> torch.dtype:
        """Return the type of our tensor: that of theirs.

        Raises CheckpointError if they differ.
        """
        kinds = {self.folder.dtype(name) for name in step.names}
        if len(kinds) > 1:
            raise CheckpointError(f"{self.folder.path}: {', '.join(step.names)} hold different types of numbers")
        return kinds.pop()

    def read(self, step: RuleApplication) -> torch.Tensor:
        """Read and convert one of our tensors."""
        return step.pack([self.folder.read(name) for name in step.names], self.shape)


def open_source(path: pathlib.Path, divisible_by: int) -> HuggingFaceSource:
    """Read config.json and the headers of all files; no tensor is read.

    Raises:
        CheckpointError: another kind of model, a missing, unknown or misshapen tensor, or files that cannot be read.
    """
    keys = read_keys(path / CONFIG)
    family = family_of(keys)
    shape = family.read(keys)
    model = dataclasses.replace(shape.model, make_vocab_size_divisible_by=divisible_by)
    shape = dataclasses.replace(shape, model=model)
    folder = TensorFolder(path)
    prefix = _prefix(family, folder)
    tied = not model.untie_embeddings_and_output_weights
    origin = FolderOrigin(model_type=family.model_type, prefix=prefix, repeats_head=tied and HEAD in folder.names)
    source = HuggingFaceSource(
        family=family, shape=shape, folder=folder, origin=origin, steps=tuple(steps(family.rules, shape, prefix))
    )
    _check_names(source)
    _check_sizes(source)
    if origin.repeats_head:
        _check_head(source)
    return source


def _prefix(family: HuggingFaceFamily, folder: TensorFolder) -> str:
    for prefix in family.prefixes:
        if prefix + family.embedding in folder.names:
            return prefix
    raise CheckpointError(
        f"{folder.path} has no tensor {family.prefixes[0]}{family.embedding}, which every {family.model_type} model has"
    )


def _check_names(source: HuggingFaceSource) -> None:
    expected = {name for step in source.steps for name in step.names}
    missing = sorted(expected - source.folder.names)
    if missing:
        raise CheckpointError(f"{source.folder.path} lacks {_some(missing)}; is the download complete?")
    known = expected | ({HEAD} if source.origin.repeats_head else set())
    unknown = sorted(name for name in source.folder.names - known if not source.family.buffers.fullmatch(name))
    if unknown:
        raise CheckpointError(
            f"{source.folder.path} has {_some(unknown)}, which no such {source.family.model_type} model has"
        )


def _check_sizes(source: HuggingFaceSource) -> None:
    for step in source.steps:
        for name, expected in zip(step.names, step.sizes(source.shape), strict=True):
            found = source.folder.size(name)
            if found != expected:
                raise CheckpointError(
                    f"{source.folder.path}: {name} is {_size(found)}, but by config.json it must be {_size(expected)}"
                )


def _check_head(source: HuggingFaceSource) -> None:
    embedding = source.origin.prefix + source.family.embedding
    if not torch.equal(source.folder.read(HEAD), source.folder.read(embedding)):
        raise CheckpointError(
            f"{source.folder.path}: {HEAD} differs from {embedding}, but tie_word_embeddings says that they are equal; "
            "set it to false in config.json"
        )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _size(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def write_ours(source: HuggingFaceSource, options: ConversionOptions, target: pathlib.Path) -> ConversionSummary:
    """Write our directory into the empty folder `target`.

    Raises CheckpointError, UsageError, OSError.
    """
    folder = target / checkpoint_name(_ITERATION)
    folder.mkdir()
    copy_companions(options.load_dir, folder, tokenizer=options.tokenizer, config=True)
    source.origin.write(folder)
    text_tokens_in(folder, options).write(folder)
    tensors = list(_tensors(source, options))
    written = tensor_files.write(tensors, source.shape.model.num_layers, folder)
    kinds = {tensor.dtype for tensor in tensors}
    tokenizer = tokenizer_arguments(folder)
    stored = arguments.record_weights(source.shape.trainer_config(precision=precision_of(kinds))) | tokenizer
    seal(folder, manifest_of(stored), written)
    (target / CHECKPOINT_TRACKER).write_text(str(_ITERATION), encoding="utf-8")
    final = options.save_dir / folder.name
    return ConversionSummary(
        family=source.family.model_type,
        written=OURS,
        path=options.save_dir,
        parameters=sum(source.folder.count(name) for step in source.steps for name in step.names),
        dtype=name_of(kinds),
        flags=tuple(arguments.model_flags(stored)),
        tokenizer=tuple(part for flag, name in tokenizer.items() for part in (flag, str(final / name))),
    )


def text_tokens_in(folder: pathlib.Path, options: ConversionOptions) -> TextTokens:
    """Read the text tokens from the tokenizer's files in a folder.

    Raises CheckpointError if they cannot be read.
    """
    try:
        return text_tokens_of(folder)
    except DataError as error:
        raise CheckpointError(
            f"{options.tokenizer or options.load_dir}: the tokenizer there cannot be read ({error.__cause__}); give "
            "another one with --tokenizer-model, or remove it from the folder"
        ) from error


def _tensors(source: HuggingFaceSource, options: ConversionOptions) -> Iterator[tensor_files.LazyTensor]:
    requested_dtype = None if options.dtype is None else torch_dtype(options.dtype)
    for step in source.steps:
        dtype = requested_dtype or source.dtype(step)
        yield tensor_files.LazyTensor(
            key=step.rule.ours,
            size=step.our_size(source.shape),
            dtype=dtype,
            layer=step.layer,
            read=lambda step=step, dtype=dtype: converted(source.read(step), dtype, " + ".join(step.names)),  # type: ignore[misc]
        )


def manifest_of(stored: dict[str, object]) -> Manifest:
    """Return the manifest of a checkpoint that has weights alone."""
    return Manifest(
        iteration=_ITERATION,
        consumed_samples=0,
        skipped_iterations=0,
        attempt=0,
        layout={"tensor": 1, "pipeline": 1, "virtual": 1, "data": 1},
        optimizer=None,
        random_states=False,
        arguments=stored,
    )
