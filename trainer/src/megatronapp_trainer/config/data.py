"""Flags of training data and tokenizer."""

import dataclasses

from megatronapp_trainer.config.fields import option, turned_off_by

WORDPIECE_TYPES = ("BertWordPieceLowerCase", "BertWordPieceCase")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Training data and tokenizer."""

    data_path: tuple[str, ...] | None = option(None, "prefix of .bin/.idx, or WEIGHT PREFIX pairs to blend")
    train_data_path: tuple[str, ...] | None = option(None, "as --data-path, for training only")
    valid_data_path: tuple[str, ...] | None = option(None, "as --data-path, for validation only")
    test_data_path: tuple[str, ...] | None = option(None, "as --data-path, for the test only")
    data_args_path: str | None = option(None, "file with the values of --data-path")
    per_split_data_args_path: str | None = option(
        None,
        'JSON file with the values of --train-data-path and the others: {"train": [...], "valid": ..., "test": ...}',
    )
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
        "BertWordPieceLowerCase or BertWordPieceCase (--vocab-file vocab.txt), for BERT; otherwise accepted if the "
        "files are of this type: GPT2BPETokenizer (--vocab-file and --merge-file) or HuggingFaceTokenizer "
        "(--tokenizer-file)",
    )
    vocab_file: str | None = option(None, "vocab.json of a GPT-2 BPE, or vocab.txt of WordPiece")
    merge_file: str | None = option(None, "merges.txt of a GPT-2 BPE")
    vocab_size: int | None = option(None, "tokens before padding; default: the tokenizer's", bounds="[1, inf)")
    sft: bool = option(
        False,
        'data paths are files of conversations ({"messages": [...]} a line), packed without attending to each other, '
        "with the loss on answers only",
    )
    sft_tokenizer_prompt_format: str = option(
        "default",
        "default: the tokenizer's chat template; identity: the contents alone; or the path of a Jinja template",
    )
    hf_dataset: tuple[str, ...] | None = option(
        None,
        "stream text from files (.parquet, .jsonl, .csv, .txt), a folder, or NAME [CONFIG] of the hub, by the package "
        "datasets",
    )
    hf_valid_dataset: tuple[str, ...] | None = option(None, "as --hf-dataset, for validation")
    hf_split: str = option("train", "split of --hf-dataset and --hf-valid-dataset")
    hf_text_field: str = option("text", "field of the examples of --hf-dataset that holds the text")
    hf_readers: int | None = option(
        None, "readers of --hf-dataset, a multiple of the replicas; default: one for each", bounds="[1, inf)"
    )
    mask_prob: float = option(0.15, "share of tokens that BERT has to predict", bounds="(0, 1)")
    short_seq_prob: float = option(0.1, "share of samples of BERT that are shorter than they could be", bounds="[0, 1]")

    @property
    def separates_documents(self) -> bool:
        """Return whether attention stays within a document, or a conversation."""
        return self.reset_attention_mask or self.sft

    @property
    def restarts_positions(self) -> bool:
        """Return whether positions begin at 0 in each document, or conversation."""
        return self.reset_position_ids or self.sft

    @property
    def is_wordpiece(self) -> bool:
        """Return whether the tokenizer is BERT's WordPiece, from a vocab.txt."""
        return self.tokenizer_type in WORDPIECE_TYPES
