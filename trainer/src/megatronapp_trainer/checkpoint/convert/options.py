"""Options of a conversion, and the summary of its result."""

import dataclasses
import pathlib
from typing import Final

HF: Final = "hf"
OURS: Final = "megatronapp"
MEGATRON: Final = "megatron"
DTYPES: Final = ("fp32", "fp16", "bf16")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionOptions:
    """Options of one conversion."""

    load_dir: pathlib.Path
    save_dir: pathlib.Path
    source: str | None = None
    """Expected source: `HF`, `OURS`, or `MEGATRON` for a checkpoint of this trainer or of Megatron-LM; None: any."""
    to: str | None = None
    """Target: `HF` or `OURS`; None: the other one."""
    family: str | None = None
    """Family of the model; None: that of config.json or the checkpoint."""
    dtype: str | None = None
    """Type of the numbers, one of `DTYPES`; None: unchanged."""
    tokenizer: pathlib.Path | None = None
    """File or folder of a tokenizer to copy instead of the source's."""
    shard_bytes: int = 5 * 10**9
    """Limit of one file of a Hugging Face folder."""
    divisible_by: int = 128
    """Our vocabulary is padded to a multiple of this."""
    iteration: int | None = None
    """Iteration of our checkpoint; None: the newest whole one."""
    tensor_size: int = 1
    pipeline_size: int = 1
    """Layout in which the model will run: it is checked, and reported; the files do not depend on it."""
    positions: str | None = None
    """`--position-embedding-type` that the model must have; None: any."""
    true_vocab_size: int | None = None
    """Tokens without padding of a checkpoint of Megatron-LM; None: by its arguments or its tokenizer."""
    overwrite: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversionSummary:
    """Summary of a finished conversion."""

    family: str
    written: str
    """Kind of the target: `HF` or `OURS`."""
    path: pathlib.Path
    parameters: int
    dtype: str
    flags: tuple[str, ...]
    """Flags that build the model; empty for a Hugging Face folder."""
    tokenizer: tuple[str, ...]
    """Flags of the copied tokenizer, with paths; empty without one."""
