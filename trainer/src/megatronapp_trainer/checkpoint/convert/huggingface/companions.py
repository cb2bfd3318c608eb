"""Files next to the weights: tokenizer and settings, which are copied in both directions."""

import json
import pathlib
import shutil
from dataclasses import asdict, dataclass

from megatronapp_trainer.checkpoint.arguments import TOKENIZER_FILE
from megatronapp_trainer.checkpoint.convert.huggingface.folder import CONFIG, INDEX
from megatronapp_trainer.errors import CheckpointError, UsageError

ORIGIN = "huggingface.json"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_SETTINGS = ("generation_config.json",)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderOrigin:
    """Facts of a Hugging Face folder that config.json lacks, so that the conversion back gives the same names."""

    model_type: str
    prefix: str
    repeats_head: bool
    """True if the folder of a tied model repeats its embedding under the head's name."""

    def write(self, folder: pathlib.Path) -> None:
        """Write the file to the folder of our weights."""
        (folder / ORIGIN).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def read_origin(folder: pathlib.Path) -> FolderOrigin | None:
    """Read the origin of a converted checkpoint; None for one that was trained here."""
    path = folder / ORIGIN
    if not path.is_file():
        return None
    try:
        return FolderOrigin(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove it, and give --family") from error


def copy_companions(
    source: pathlib.Path, folder: pathlib.Path, *, tokenizer: pathlib.Path | None, config: bool
) -> None:
    """Copy the files next to the weights in `source`; the tokenizer from `tokenizer`, a file or folder, where given.

    `config`: config.json too. Raises UsageError if `tokenizer` has none.
    """
    names = _SETTINGS + ((CONFIG,) if config else ())
    files = [source / name for name in names]
    files += _tokenizer_files(tokenizer) if tokenizer is not None else [source / name for name in _TOKENIZER]
    for file in files:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


def check_tokenizer(given: pathlib.Path | None) -> None:
    """Raise UsageError if this file or folder, where given, is not a tokenizer that can be trained and served with.

    Old commands name tokenizer.model, or vocab.json: the other files of its folder are used.
    """
    if given is not None:
        _tokenizer_files(given)


def tokenizer_note(source: pathlib.Path) -> str | None:
    """Describe what a Hugging Face folder lacks for training and serving with texts; None if nothing."""
    if tokenizer_arguments(source):
        return None
    return (
        f"{source} {_lack(source)}: the checkpoint will have no tokenizer, so that it takes and gives ids of tokens; "
        f"for texts give --tokenizer-model PATH{_REMEDY if (source / _SENTENCEPIECE).is_file() else ''}"
    )


_SENTENCEPIECE = "tokenizer.model"
_REMEDY = (
    "; transformers makes tokenizer.json of tokenizer.model: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)


def _lack(folder: pathlib.Path) -> str:
    alone = [name for name in (_SENTENCEPIECE, "vocab.json", "merges.txt") if (folder / name).is_file()]
    description = f"holds {' and '.join(alone)} but" if alone else "holds"
    return f"{description} neither tokenizer.json nor vocab.json with merges.txt"


def _tokenizer_files(given: pathlib.Path) -> list[pathlib.Path]:
    if given.is_file() and given.name == "tokenizer.json":
        return [given]
    folder = given.parent if given.name in _TOKENIZER or given.suffix == ".model" else given
    if not given.exists() or not folder.is_dir():
        raise UsageError(f"--tokenizer-model {given} is neither a tokenizer.json nor a folder with one; check the path")
    if not tokenizer_arguments(folder):
        raise UsageError(
            f"--tokenizer-model {given}: {folder} {_lack(folder)}; give one of these, or its folder"
            f"{_REMEDY if (folder / _SENTENCEPIECE).is_file() else ''}"
        )
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]


def is_written_by_us(folder: pathlib.Path) -> bool:
    """Return True if a Hugging Face folder has only files that a conversion writes."""
    known = {CONFIG, INDEX, *_SETTINGS, *_TOKENIZER}
    return all(entry.name in known or entry.suffix == ".safetensors" for entry in folder.iterdir())


def tokenizer_arguments(folder: pathlib.Path) -> dict[str, str]:
    """Return the trainer's flags for the tokenizer of a folder, with file names in it."""
    if (folder / "tokenizer.json").is_file():
        return {TOKENIZER_FILE: "tokenizer.json"}
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return {"--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    return {}
