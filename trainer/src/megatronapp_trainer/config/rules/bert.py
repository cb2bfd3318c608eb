"""Rules for BERT: its flags, and what it cannot be combined with yet."""

from collections.abc import Iterator

from megatronapp_trainer.config.data import WORDPIECE_TYPES, DataConfig
from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.model import ModelConfig
from megatronapp_trainer.config.root import TrainerConfig

LEAST_TOKENS = 16
"""Smallest vocabulary of mock data: some tokens besides the special ones."""
SPECIAL_TOKENS = 3
"""Tokens of a sample besides its texts."""
SHORTEST = 8
"""Shortest sample: special tokens, and some text in two parts."""


def bert_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    if config.model.type != "bert":
        yield from _flags_of_bert(config)
        return
    yield from _data_problems(config)
    model, control = config.model, config.control
    unsupported = {
        "--forward-backward-disaggregating": config.fbd.enabled,
        "--training-control": control.training_control,
        "--training-ws-port": control.training_ws_port is not None,
        "--scope-capture-interval": control.scope_capture_interval is not None,
        "--transformer-impl transformer_engine": model.transformer_impl == "transformer_engine",
        f"--position-embedding-type {model.position_embedding_type}": (
            model.position_embedding_type != "learned_absolute"
        ),
        "--window-size": model.attention_window is not None,
        "--qk-layernorm": model.qk_layernorm,
        "--calculate-per-token-loss": config.training.calculate_per_token_loss,
    }
    for flag, on in unsupported.items():
        yield from require(not on, f"{flag} is not supported with --model-type bert; leave it out")
    yield from require(
        not config.is_vee,
        "--model-type bert cannot be placed in a vee yet; leave --dpp-placement vee out, or take another "
        "--dpp-schedule than zero-bubble",
    )


def _flags_of_bert(config: TrainerConfig) -> Iterator[str]:
    data, defaults = config.data, DataConfig()
    given = {
        "--bert-no-binary-head": config.model.bert_binary_head != ModelConfig().bert_binary_head,
        "--mask-prob": data.mask_prob != defaults.mask_prob,
        "--short-seq-prob": data.short_seq_prob != defaults.short_seq_prob,
        f"--tokenizer-type {data.tokenizer_type}": data.is_wordpiece,
    }
    for flag, on in given.items():
        yield from require(not on, f"{flag} needs --model-type bert; add it, or leave {flag} out")


def _data_problems(config: TrainerConfig) -> Iterator[str]:
    data, length = config.data, config.model.seq_length
    yield from require(
        length >= SHORTEST, f"--seq-length {length} is too short for --model-type bert; take {SHORTEST} or more"
    )
    yield from require(
        not data.mock_data or data.vocab_size is None or data.vocab_size >= LEAST_TOKENS,
        f"--mock-data with --model-type bert needs --vocab-size {LEAST_TOKENS} or more",
    )
    yield from _mask_problems(config)
    yield from require(
        not data.mock_data or data.short_seq_prob == DataConfig().short_seq_prob,
        "--short-seq-prob is for samples of a corpus, and --mock-data has none; leave it out",
    )
    yield from require(
        data.mock_data or (data.is_wordpiece and data.vocab_file is not None),
        f"--model-type bert needs its tokenizer: --vocab-file vocab.txt and --tokenizer-type "
        f"{' or '.join(WORDPIECE_TYPES)}",
    )
    for flag, on in (
        ("--eod-mask-loss", data.eod_mask_loss),
        ("--reset-position-ids", data.reset_position_ids),
        ("--reset-attention-mask", data.reset_attention_mask),
    ):
        yield from require(
            not on, f"{flag} does nothing with --model-type bert, whose samples are padded; leave it out"
        )


def _mask_problems(config: TrainerConfig) -> Iterator[str]:
    """Refuse a corpus of whose samples megatron-core would mask no token.

    It masks at most the share of --mask-prob of the longest texts, and whole words, so that less than a token is none.
    """
    probability, length = config.data.mask_prob, config.model.seq_length
    if config.data.mock_data or length < SHORTEST or not 0 < probability < 1:
        return
    yield from require(
        probability * (length - SPECIAL_TOKENS) >= 1,
        f"--mask-prob {probability} with --seq-length {length} masks no token of a sample; take "
        f"--seq-length {int(1 / probability) + 1 + SPECIAL_TOKENS} or more, or a larger --mask-prob",
    )
