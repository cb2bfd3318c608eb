"""Conversion of a checkpoint of ours to a Hugging Face folder."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatronapp_trainer.checkpoint import arguments
from megatronapp_trainer.checkpoint.convert.dtypes import converted, name_of, torch_dtype
from megatronapp_trainer.checkpoint.convert.families import FAMILIES, HEAD, HuggingFaceFamily
from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys, read_keys
from megatronapp_trainer.checkpoint.convert.huggingface.companions import (
    copy_companions,
    read_origin,
    tokenizer_arguments,
)
from megatronapp_trainer.checkpoint.convert.huggingface.folder import CONFIG, TensorWriter
from megatronapp_trainer.checkpoint.convert.huggingface.special_tokens import text_tokens_of
from megatronapp_trainer.checkpoint.convert.options import HF, ConversionOptions, ConversionSummary
from megatronapp_trainer.checkpoint.convert.rules import RuleApplication, steps
from megatronapp_trainer.checkpoint.convert.shape import ModelShape
from megatronapp_trainer.checkpoint.directory import (
    MANIFEST,
    BrokenCheckpointError,
    CheckpointDirectory,
    Manifest,
    read_manifest,
)
from megatronapp_trainer.checkpoint.storage import damaged_weights
from megatronapp_trainer.checkpoint.tensor_files import StoredTensors
from megatronapp_trainer.data.text_tokens import TextTokens, read_text_tokens
from megatronapp_trainer.errors import CheckpointError, DataError, UsageError

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """A checkpoint of ours that has all tensors of a family's model."""

    path: pathlib.Path
    family: HuggingFaceFamily
    shape: ModelShape
    tensors: StoredTensors
    steps: tuple[RuleApplication, ...]
    repeats_head: bool

    def read(self, options: ConversionOptions) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield their tensors with their names, in the order of ours."""
        requested_dtype = None if options.dtype is None else torch_dtype(options.dtype)
        for step in self.steps:
            tensor = self.tensors.read(step.rule.ours, step.layer)
            parts = [
                converted(part, requested_dtype or part.dtype, name)
                for name, part in zip(step.names, step.unpack(tensor, self.shape), strict=True)
            ]
            yield from zip(step.names, parts, strict=True)
            if self.repeats_head and step.rule.ours == _EMBEDDING:
                yield HEAD, parts[0]


def find_checkpoint(
    path: pathlib.Path, iteration: int | None, report: Callable[[str], None] = lambda _: None
) -> tuple[pathlib.Path, Manifest]:
    """Return the folder of the newest whole checkpoint, or of this iteration, and its manifest.

    `path` may be that folder itself; `report` receives why newer ones are skipped. Raises CheckpointError if it does
    not exist, or is not one of GPT.
    """
    found = [path] if (path / MANIFEST).is_file() else CheckpointDirectory(path).checkpoints()
    flaws = []
    for folder in found:
        try:
            manifest = read_manifest(folder)
        except BrokenCheckpointError as error:
            flaws.append(f"{folder.name}: {error}")
            continue
        if iteration not in (None, manifest.iteration):
            continue
        flaw = damaged_weights(folder, manifest)
        if flaw is None:
            _check_convertible(folder, manifest)
            for skipped in flaws if iteration is None else ():
                report(f"{skipped}; {folder.name} is converted instead")
            return folder, manifest
        flaws.append(f"{folder.name}: {flaw}")
    expected = "a whole checkpoint" if iteration is None else f"a whole checkpoint of iteration {iteration}"
    raise CheckpointError(f"{path} holds no {expected[2:]}{''.join(f'; {flaw}' for flaw in flaws[:3])}")


def _check_convertible(folder: pathlib.Path, manifest: Manifest) -> None:
    name = arguments.type_of(manifest.arguments)
    if name != "gpt":
        raise CheckpointError(f"{folder} is a {name.upper()} checkpoint; only GPT is converted")


def open_stored(path: pathlib.Path, manifest: Manifest, family: str | None) -> StoredModel:
    """Read the manifest and the list of tensors; no tensor is read.

    Raises:
        CheckpointError: no family has such a model, or a tensor is missing or misshapen.
        UsageError: the model is not of the family that was requested.
    """
    tensors = _tensors(path)
    shape = _shape(manifest, tensors, path)
    origin = read_origin(path)
    chosen = _choose(shape, family or (origin.model_type if origin is not None else None))
    same = origin is not None and origin.model_type == chosen.model_type
    prefix = origin.prefix if origin is not None and same else chosen.prefixes[0]
    stored = StoredModel(
        path=path,
        family=chosen,
        shape=shape,
        tensors=tensors,
        steps=tuple(steps(chosen.rules, shape, prefix)),
        repeats_head=origin is not None and same and origin.repeats_head,
    )
    _check(stored)
    return stored


def _tensors(path: pathlib.Path) -> StoredTensors:
    try:
        return StoredTensors(path)
    except BrokenCheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _shape(manifest: Manifest, tensors: StoredTensors, path: pathlib.Path) -> ModelShape:
    """Return the model of a manifest, with the padding of its embedding."""
    embedding = tensors.find(_EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{path} holds no {_EMBEDDING}: it is not the checkpoint of a GPT model")
    model = arguments.model_of(manifest.arguments)
    return ModelShape(
        model=dataclasses.replace(model, make_vocab_size_divisible_by=embedding.size[0]),
        vocab_size=manifest.arguments["--vocab-size"],
    )


def _choose(shape: ModelShape, name: str | None) -> HuggingFaceFamily:
    """Return the family of this name, or the first one that can hold the model."""
    candidates = [FAMILIES[name]] if name is not None else list(FAMILIES.values())
    reasons = {family.model_type: _misfit(family, shape) for family in candidates}
    for family in candidates:
        if reasons[family.model_type] is None:
            return family
    if name is not None:
        raise UsageError(f"--family {name} cannot hold this model: {reasons[name]}")
    nearest_first = sorted(reasons.items(), key=lambda entry: str(entry[1]).count(", "))
    reasons_by_family = "; ".join(f"{family}: {reason}" for family, reason in nearest_first)
    raise CheckpointError(f"no family of Hugging Face models holds this model ({reasons_by_family})")


def _misfit(family: HuggingFaceFamily, shape: ModelShape) -> str | None:
    """Return why config.json of a family cannot describe this model, or None."""
    try:
        again = family.read(ConfigKeys({"vocab_size": shape.vocab_size, **family.write(shape)}, "config.json"))
    except CheckpointError as error:
        return str(error)
    return arguments.model_difference(shape.trainer_config(), again.trainer_config())


def _check(stored: StoredModel) -> None:
    for step in stored.steps:
        name, found = step.rule.ours, stored.tensors.find(step.rule.ours)
        if found is None:
            raise CheckpointError(f"{stored.path} lacks {name}, which a {stored.family.model_type} model has")
        layers = () if step.layer is None else (stored.shape.model.num_layers,)
        expected = (*layers, *step.our_size(stored.shape))
        if tuple(found.size) != expected:
            raise CheckpointError(
                f"{stored.path}: {name} is {tuple(found.size)}, but by its manifest it must be {expected}"
            )


def write_hf(stored: StoredModel, options: ConversionOptions, target: pathlib.Path) -> ConversionSummary:
    """Write a Hugging Face folder into the empty folder `target`.

    Raises CheckpointError, UsageError, OSError.
    """
    copy_companions(stored.path, target, tokenizer=options.tokenizer, config=False)
    kinds: set[torch.dtype] = set()
    total = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal total
        for name, tensor in stored.read(options):
            kinds.add(tensor.dtype)
            total += 0 if stored.repeats_head and name == HEAD else tensor.numel()
            yield name, tensor

    try:
        TensorWriter(target, options.shard_bytes).write(counted())
    except BrokenCheckpointError as error:
        raise CheckpointError(f"{stored.path}: {error}") from error
    _write_config(stored, target, kinds)
    tokenizer = tokenizer_arguments(target)
    return ConversionSummary(
        family=stored.family.model_type,
        written=HF,
        path=options.save_dir,
        parameters=total,
        dtype=name_of(kinds),
        flags=(),
        tokenizer=tuple(part for flag, name in tokenizer.items() for part in (flag, str(options.save_dir / name))),
    )


_DTYPE_KEYS = ("dtype", "torch_dtype")


def _write_config(stored: StoredModel, target: pathlib.Path, kinds: set[torch.dtype]) -> None:
    """Write the model's original config.json if it still describes the model, and a new one if not."""
    name = str(next(iter(kinds))).removeprefix("torch.") if len(kinds) == 1 else "float32"
    values = _stored_config(stored)
    if values is None:
        values = _new_config(stored, target) | {"torch_dtype": name}
    elif all(values.get(key, name) == name for key in _DTYPE_KEYS):
        (target / CONFIG).write_bytes((stored.path / CONFIG).read_bytes())
        return
    values |= {key: name for key in _DTYPE_KEYS if key in values}
    (target / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _stored_config(stored: StoredModel) -> dict[str, Any] | None:
    path = stored.path / CONFIG
    if not path.is_file():
        return None
    keys = read_keys(path)
    if keys.get("model_type") != stored.family.model_type:
        return None
    difference = arguments.model_difference(stored.family.read(keys).trainer_config(), stored.shape.trainer_config())
    return dict(keys.values) if difference is None else None


def _new_config(stored: StoredModel, target: pathlib.Path) -> dict[str, Any]:
    document, given = _of_tokenizer(target)
    known = read_text_tokens(stored.path)
    ends = known.ends or given.ends or document
    return {
        "architectures": [stored.family.architecture],
        "model_type": stored.family.model_type,
        "vocab_size": stored.shape.vocab_size,
        **stored.family.write(stored.shape),
        "bos_token_id": next(iter(known.before or given.before or document), None),
        "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
    }


def _of_tokenizer(folder: pathlib.Path) -> tuple[tuple[int, ...], TextTokens]:
    """Return the end-of-document token and the text tokens, if a readable tokenizer is copied along."""
    from megatronapp_trainer.data import tokenizer

    given = TextTokens()
    try:
        given = text_tokens_of(folder)
        return ((tokenizer.load_file(folder).eod,) if (folder / "tokenizer.json").is_file() else ()), given
    except DataError:
        return (), given
