"""Flags of training data and tokenizer."""

import dataclasses

from megatronapp_trainer.config.fields import option, turned_off_by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Training data and tokenizer."""

    data_path: tuple[str, ...] | None = option(None, "prefix of .bin/.idx, or WEIGHT PREFIX pairs to blend")
    train_data_path: tuple[str, ...] | None = option(None, "as --data-path, for training only")
    valid_data_path: tuple[str, ...] | None = option(None, "as --data-path, for validation only")
    test_data_path: tuple[str, ...] | None = option(None, "as --data-path, for the test only")
    split: str | None = option(None, "shares of training, validation, test; default 969,30,1")
    data_cache_path: str | None = option(None, "directory for indices of shuffled samples")
    mock_data: bool = option(False, "random tokens with a learnable structure; needs --vocab-size")
    num_workers: int = option(2, "threads that read ahead", bounds="[0, inf)")
    mmap_bin_files: bool = turned_off_by("--no-mmap-bin-files", "read .bin files instead of mapping them")
    eod_mask_loss: bool = option(False, "no loss where the input is the end of a document")
    reset_position_ids: bool = option(False, "positions begin at 0 in each document")
    reset_attention_mask: bool = option(False, "attention stays within a document")
    tokenizer_file: str | None = option(
        None, "tokenizer.json of the tokenizers library, or its folder", aliases=("--tokenizer-model",)
    )
    tokenizer_type: str | None = option(
        None,
        "accepted if the files are of this type: GPT2BPETokenizer (--vocab-file and --merge-file) or "
        "HuggingFaceTokenizer (--tokenizer-file)",
    )
    vocab_file: str | None = option(None, "vocab.json of a GPT-2 BPE")
    merge_file: str | None = option(None, "merges.txt of a GPT-2 BPE")
    vocab_size: int | None = option(None, "tokens before padding; default: the tokenizer's", bounds="[1, inf)")
