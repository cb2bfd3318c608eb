"""What a conversion is asked for, and what it tells."""

import dataclasses
import pathlib
from typing import Final

HF: Final = "hf"
OURS: Final = "megatronapp"
MEGATRON: Final = "megatron"
DTYPES: Final = ("fp32", "fp16", "bf16")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionOptions:
    """A conversion."""

    load_dir: pathlib.Path
    save_dir: pathlib.Path
    source: str | None = None
    """`HF`, `OURS`, or `MEGATRON` for what either this trainer or Megatron-LM wrote; None: what the folder holds."""
    to: str | None = None
    """`HF` or `OURS`; None: the other one."""
    family: str | None = None
    """None: what config.json or the checkpoint says."""
    dtype: str | None = None
    """One of `DTYPES`; None: as it is."""
    tokenizer: pathlib.Path | None = None
    """A file or folder of a tokenizer that goes along, instead of the source's."""
    shard_bytes: int = 5 * 10**9
    """Of one file of a Hugging Face folder."""
    divisible_by: int = 128
    """Our vocabulary is padded to a multiple of this."""
    iteration: int | None = None
    """Which of our checkpoints; None: the newest whole one."""
    tensor_size: int = 1
    pipeline_size: int = 1
    """The layout that the model is wanted for: it is checked, and told in the report; the files do not depend on it."""
    positions: str | None = None
    """`--position-embedding-type` that the model must have; None: any."""
    true_vocab_size: int | None = None
    """Tokens without padding of a checkpoint of Megatron-LM; None: what its arguments or its tokenizer say."""
    overwrite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionSummary:
    """What a conversion made."""

    family: str
    written: str
    """`HF` or `OURS`."""
    path: pathlib.Path
    parameters: int
    dtype: str
    flags: tuple[str, ...]
    """That build the model; empty for a Hugging Face folder."""
    tokenizer: tuple[str, ...]
    """Flags of the tokenizer that went along, with paths; empty without one."""
