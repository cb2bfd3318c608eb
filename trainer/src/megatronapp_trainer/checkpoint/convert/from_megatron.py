"""Conversion of a checkpoint of Megatron-LM, or of ours, to a checkpoint of ours that has the weights alone."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import torch

from megatronapp_common.names import CHECKPOINT_TRACKER
from megatronapp_trainer.checkpoint import arguments as stored_arguments
from megatronapp_trainer.checkpoint import tensor_files
from megatronapp_trainer.checkpoint.convert.dtypes import converted, name_of, precision_of, torch_dtype
from megatronapp_trainer.checkpoint.convert.huggingface.companions import (
    copy_companions,
    read_origin,
    tokenizer_arguments,
)
from megatronapp_trainer.checkpoint.convert.huggingface.load import manifest_of, text_tokens_in
from megatronapp_trainer.checkpoint.convert.huggingface.save import find_checkpoint
from megatronapp_trainer.checkpoint.convert.megatron.arguments import (
    megatron_tokenizer_arguments,
    model_from,
    vocabulary_from,
    with_rows,
)
from megatronapp_trainer.checkpoint.convert.megatron.legacy import LegacyWeights
from megatronapp_trainer.checkpoint.convert.megatron.torch_dist import CoreWeights, open_torch_dist
from megatronapp_trainer.checkpoint.convert.megatron.weights import (
    EMBEDDING,
    CheckpointWeights,
    ExpectedTensor,
    expected,
)
from megatronapp_trainer.checkpoint.convert.megatron.weights import name_of as place_name
from megatronapp_trainer.checkpoint.convert.options import OURS, ConversionOptions, ConversionSummary
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.checkpoint.directory import (
    MANIFEST,
    BrokenCheckpointError,
    checkpoint_name,
    seal,
)
from megatronapp_trainer.checkpoint.foreign import MegatronLayout, answer, megatron_checkpoint
from megatronapp_trainer.data import text_tokens
from megatronapp_trainer.errors import CheckpointError, UsageError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSource:
    """A checkpoint that has all weights, with the right sizes."""

    folder: pathlib.Path
    weights: CheckpointWeights
    shape: ModelShape
    expected: tuple[ExpectedTensor, ...]
    iteration: int
    trained_with: str | None
    """Options of its tokenizer, if the checkpoint has them."""

    def with_padding(self, multiple: int) -> ModelShape:
        """Return the model with its vocabulary padded to a multiple, as it is written."""
        return dataclasses.replace(self.shape, model=with_rows(self.shape.model, multiple))


def open_megatron(path: pathlib.Path, iteration: int | None, true_vocab_size: int | None) -> MegatronSource:
    """Read the arguments and the list of tensors of Megatron-LM's checkpoint; no tensor is read.

    Raises:
        CheckpointError: it is not one, its model cannot be converted, or a tensor is missing, unknown or misshapen.
    """
    found = megatron_checkpoint(path, iteration)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint of Megatron-LM of iteration {iteration}")
    folder, layout = found
    if layout is MegatronLayout.ZARR:
        raise CheckpointError(str(answer(path)))
    try:
        weights: CheckpointWeights = (
            LegacyWeights(folder) if layout is MegatronLayout.LEGACY else open_torch_dist(folder)
        )
        model = model_from(weights.arguments)
    except (BrokenCheckpointError, CheckpointError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    rows = _rows(folder, weights)
    size = vocabulary_from(weights.arguments, rows) if true_vocab_size is None else true_vocab_size
    if size > rows:
        raise UsageError(f"--true-vocab-size {size} is more than the {rows} rows of the embedding")
    shape = ModelShape(model=with_rows(model, rows), vocab_size=size)
    return _checked(folder, weights, shape, megatron_tokenizer_arguments(weights.arguments))


def open_ours(path: pathlib.Path, iteration: int | None, report: Callable[[str], None]) -> MegatronSource:
    """Open the newest whole checkpoint of ours, or that of this iteration; `report` as in `find_checkpoint`.

    Raises CheckpointError.
    """
    folder, manifest = find_checkpoint(path, iteration, report)
    try:
        weights = CoreWeights(folder, manifest.arguments, manifest.iteration)
    except BrokenCheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    model = with_rows(stored_arguments.model_of(manifest.arguments), _rows(folder, weights))
    shape = ModelShape(model=model, vocab_size=manifest.arguments["--vocab-size"])
    return _checked(folder, weights, shape, None)


def _rows(folder: pathlib.Path, weights: CheckpointWeights) -> int:
    if (EMBEDDING, None) not in weights.places():
        raise CheckpointError(f"{folder} holds no {EMBEDDING}: it is not the checkpoint of a GPT model")
    return weights.size((EMBEDDING, None))[0]


def _checked(
    folder: pathlib.Path, weights: CheckpointWeights, shape: ModelShape, trained_with: str | None
) -> MegatronSource:
    tensors = tuple(expected(shape.model, shape.padded_vocab_size))
    places = weights.places()
    missing = [place_name(tensor.place) for tensor in tensors if tensor.place not in places]
    if missing:
        raise CheckpointError(f"{folder} lacks {_some(missing)}, which its arguments promise; is the copy complete?")
    unknown = sorted(place_name(place) for place in places - {tensor.place for tensor in tensors})
    if unknown:
        raise CheckpointError(f"{folder} has {_some(unknown)}, which no such model of this trainer has")
    for tensor in tensors:
        found = weights.size(tensor.place)
        if found != tensor.size:
            raise CheckpointError(
                f"{folder}: {place_name(tensor.place)} is {found}, but by its arguments it must be {tensor.size}"
            )
    return MegatronSource(
        folder=folder,
        weights=weights,
        shape=shape,
        expected=tensors,
        iteration=weights.iteration,
        trained_with=trained_with,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def notes(source: MegatronSource, options: ConversionOptions) -> list[str]:
    """List what is not converted, for a message before anything is written."""
    found = [
        f"the weights of iteration {source.iteration} are converted, not the optimizer's state: train with --finetune"
    ]
    if options.tokenizer is None and not tokenizer_arguments(source.folder):
        origin = f" (it was trained with {source.trained_with})" if source.trained_with else ""
        found.append(f"no tokenizer is copied{origin}; give its files with --tokenizer-model PATH")
    return found


def write_weights(source: MegatronSource, options: ConversionOptions, target: pathlib.Path) -> ConversionSummary:
    """Write our directory into the empty folder `target`.

    Raises CheckpointError, OSError.
    """
    folder = target / checkpoint_name(0)
    folder.mkdir()
    copy_companions(source.folder, folder, tokenizer=options.tokenizer, config=(source.folder / MANIFEST).exists())
    origin = read_origin(source.folder)
    if origin is not None:
        origin.write(folder)
    stored_tokens = source.folder / text_tokens.FILE
    if options.tokenizer is None and stored_tokens.is_file():
        (folder / stored_tokens.name).write_bytes(stored_tokens.read_bytes())
    else:
        text_tokens_in(folder, options).write(folder)
    tensors = list(_tensors(source, options))
    try:
        written = tensor_files.write(tensors, source.shape.model.num_layers, folder)
    except BrokenCheckpointError as error:
        raise CheckpointError(f"{source.folder}: {error}") from error
    kinds = {tensor.dtype for tensor in tensors}
    tokenizer = tokenizer_arguments(folder)
    shape = source.with_padding(options.divisible_by)
    stored = stored_arguments.record_weights(shape.trainer_config(precision=precision_of(kinds))) | tokenizer
    seal(folder, manifest_of(stored), written)
    (target / CHECKPOINT_TRACKER).write_text("0", encoding="utf-8")
    final = options.save_dir / folder.name
    return ConversionSummary(
        family=f"GPT of {source.folder}",
        written=OURS,
        path=options.save_dir,
        parameters=sum(torch.Size(tensor.size).numel() for tensor in source.expected),
        dtype=name_of(kinds),
        flags=tuple(stored_arguments.model_flags(stored)),
        tokenizer=tuple(part for flag, name in tokenizer.items() for part in (flag, str(final / name))),
    )


def _tensors(source: MegatronSource, options: ConversionOptions) -> Iterator[tensor_files.LazyTensor]:
    requested_dtype = None if options.dtype is None else torch_dtype(options.dtype)
    for tensor in source.expected:
        dtype = requested_dtype or source.weights.dtype(tensor.place)
        yield tensor_files.LazyTensor(
            key=tensor.place[0],
            size=tensor.size,
            dtype=dtype,
            layer=tensor.place[1],
            read=lambda tensor=tensor, dtype=dtype: converted(  # type: ignore[misc]
                source.weights.read(tensor.place), dtype, place_name(tensor.place)
            ),
        )
