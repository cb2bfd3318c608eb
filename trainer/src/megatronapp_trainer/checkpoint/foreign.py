"""Recognition of folders that are not of this trainer, and advice on what to do with them. Files only, no torch.

DIR/latest_checkpointed_iteration.txt            a number, or the word release
DIR/iter_0000020/mp_rank_00[_000]/model_optim_rng.pt     Megatron-LM's legacy layout: tensor and pipeline rank
DIR/iter_0000020/.metadata, common.pt, *.distcp  Megatron-LM's torch_dist: common.pt keeps the arguments
"""

import enum
import json
import pathlib
import re

from megatronapp_common.names import CHECKPOINT_TRACKER
from megatronapp_trainer.checkpoint.directory import MANIFEST

CONVERT = "megatronapp checkpoint convert"
CORE_METADATA = "metadata.json"
COMMON = "common.pt"
RELEASE = "release"
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
"""Tensor, pipeline and expert rank."""
_ITERATION = re.compile(r"iter_(\d+)")
_OF_ARGUMENTS = b"argparse"
"""Bytes in the pickle of Megatron-LM's arguments; common.pt of this trainer lacks them."""


class MegatronLayout(enum.StrEnum):
    """Layout in which Megatron-LM has written a checkpoint."""

    TORCH_DIST = "torch_dist"
    LEGACY = "legacy"
    ZARR = "zarr"


_DESCRIPTIONS = {
    MegatronLayout.TORCH_DIST: "a checkpoint of Megatron-LM (torch_dist)",
    MegatronLayout.LEGACY: "a checkpoint of Megatron-LM in the legacy layout (mp_rank_...)",
    MegatronLayout.ZARR: "a checkpoint of Megatron-LM (zarr)",
}


def layout_of(folder: pathlib.Path) -> MegatronLayout | None:
    """Return the layout of one iteration's checkpoint; None if it is not of Megatron-LM."""
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return None
    if rank_files(folder):
        return MegatronLayout.LEGACY
    if _backend(folder) == MegatronLayout.ZARR:
        return MegatronLayout.ZARR
    common = folder / COMMON
    if (folder / ".metadata").is_file() and common.is_file() and _OF_ARGUMENTS in common.read_bytes():
        return MegatronLayout.TORCH_DIST
    return None


def rank_files(folder: pathlib.Path) -> dict[tuple[int, int, int], pathlib.Path]:
    """Return the files of the legacy layout by pipeline, tensor and expert rank."""
    found: dict[tuple[int, int, int], pathlib.Path] = {}
    for entry in folder.iterdir():
        match = RANK_FOLDER.fullmatch(entry.name)
        file = next((entry / name for name in RANK_FILES if (entry / name).is_file()), None)
        if match is not None and file is not None:
            found[int(match[2] or 0), int(match[1]), int(match[3] or 0)] = file
    return found


def megatron_checkpoint(path: pathlib.Path, iteration: int | None = None) -> tuple[pathlib.Path, MegatronLayout] | None:
    """Find the checkpoint of this iteration, or `path` itself, then the tracker's, then the newest, or None."""
    for folder in _candidates(path, iteration):
        if (layout := layout_of(folder)) is not None:
            return folder, layout
    return None


def answer(path: pathlib.Path) -> str | None:
    """Describe what `path` is and what to write instead; None if it is a directory of our checkpoints."""
    if (path / MANIFEST).is_file():
        return f"{path} is one checkpoint; give its directory: {path.parent}"
    found = megatron_checkpoint(path)
    if found is not None and found[1] is MegatronLayout.ZARR:
        return (
            f"{path} holds {_DESCRIPTIONS[found[1]]}, which is not read; save it with Megatron-LM once more with "
            "--dist-ckpt-format torch_dist, then convert that"
        )
    if found is None and not _is_hugging_face(path):
        return None
    what = "a model of Hugging Face" if found is None else _DESCRIPTIONS[found[1]]
    target = path.with_name(f"{path.name}-megatronapp")
    return (
        f"{path} holds {what}, which is converted first: {CONVERT} --load-dir {path} --save-dir {target}; then give "
        f"--load {target} (a training starts from its weights with --finetune)"
    )


def _is_hugging_face(path: pathlib.Path) -> bool:
    weights = ("*.safetensors", "pytorch_model*.bin")
    return (path / "config.json").is_file() and any(any(path.glob(pattern)) for pattern in weights)


def _candidates(path: pathlib.Path, iteration: int | None) -> list[pathlib.Path]:
    if not path.is_dir():
        return []
    numbered = [(int(match[1]), entry) for entry in path.iterdir() if (match := _ITERATION.fullmatch(entry.name))]
    newest_first = [entry for _, entry in sorted(numbered, reverse=True)]
    if iteration is not None:
        return [entry for number, entry in numbered if number == iteration]
    return [path, *_tracked(path), *newest_first, path / RELEASE]


def _tracked(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the folder that the tracker names, if any."""
    try:
        text = (path / CHECKPOINT_TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return []
    if text == RELEASE:
        return [path / RELEASE]
    return [path / f"iter_{int(text):07d}"] if text.isascii() and text.isdigit() else []


def _backend(folder: pathlib.Path) -> str | None:
    try:
        stored = json.loads((folder / CORE_METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored.get("sharded_backend") if isinstance(stored, dict) else None
