"""Training data of BERT without files: a structured text, cut in two, with masked tokens.

As of GPT's mock data a sample is a function of (seed, split, global sample index) alone. Tokens follow from their
neighbours, so that masked ones can be predicted, and the second text continues the first one unless they are swapped.
"""

import itertools
from collections.abc import Iterator

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.bert.microbatches import HostBertMicrobatch
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.data.mock_data import mock_sample
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.utils.keyed_generator import generator_of

PAD, CLS, SEP, MASK = range(4)
_SPECIAL = 4
_UNCHANGED = 0.2
"""Share of masked positions whose token stays as it is."""


def build_mock_iterators(config: TrainerConfig, layout: Layout, consumed_samples: int) -> DataIterators:
    """Build training, validation and test microbatches of this rank."""
    return DataIterators(
        train=mock_batches(config, layout, split=0, first_sample=consumed_samples),
        valid=_endless_evaluations(config, layout, split=1),
        test=_endless_evaluations(config, layout, split=2),
    )


def _endless_evaluations(config: TrainerConfig, layout: Layout, *, split: int) -> Iterator[HostBertMicrobatch]:
    """Repeat the microbatches of one evaluation, so that every evaluation sees the same samples."""
    stride = config.training.micro_batch_size * layout.data_size
    microbatches = config.logging.eval_iters * config.global_batch_size(layout.data_size) // stride
    while True:
        yield from itertools.islice(mock_batches(config, layout, split=split, first_sample=0), microbatches)


def mock_batches(
    config: TrainerConfig, layout: Layout, *, split: int, first_sample: int
) -> Iterator[HostBertMicrobatch]:
    """Yield microbatches in the order of Megatron's sampler: replicas alternate."""
    size, seed = config.training.micro_batch_size, config.training.seed
    sample = first_sample + layout.data_rank * size
    while True:
        rows = [mock_pair(f"{seed}:{split}:{sample + row}", config) for row in range(size)]
        yield HostBertMicrobatch(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})  # type: ignore[literal-required, typeddict-item]
        sample += layout.data_size * size


def mock_pair(key: str, config: TrainerConfig) -> HostBertMicrobatch:
    """Return one sample, int64 [S], and [] of `swapped`: a quarter of them or less is padding."""
    length, has_pairs = config.model.seq_length, config.model.bert_binary_head
    generator = generator_of(f"bert:{key}")
    specials = 3 if has_pairs else 2
    text_length = int(torch.randint(length * 3 // 4, length + 1, (), generator=generator)) - specials
    text = mock_sample(key, (config.data.vocab_size or _SPECIAL + 1) - _SPECIAL, text_length) + _SPECIAL
    middle = int(torch.randint(1, text_length, (), generator=generator)) if has_pairs else text_length
    swapped = bool(has_pairs and torch.rand((), generator=generator) < 0.5)
    first, second = (text[middle:], text[:middle]) if swapped else (text[:middle], text[middle:])
    cls, sep = torch.tensor([CLS]), torch.tensor([SEP])
    parts = [cls, first, sep, second, sep] if has_pairs else [cls, first, sep]
    whole = torch.cat(parts)
    loss_mask = ((torch.rand(len(whole), generator=generator) < config.data.mask_prob) & (whole >= _SPECIAL)).long()
    hidden = (loss_mask == 1) & (torch.rand(len(whole), generator=generator) >= _UNCHANGED)
    types = torch.zeros_like(whole)
    types[len(first) + 2 :] = 1
    padding = (0, length - len(whole))

    def padded(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, padding)

    return {
        "tokens": padded(whole.masked_fill(hidden, MASK)),
        "token_types": padded(types),
        "labels": padded(whole * loss_mask),
        "loss_mask": padded(loss_mask),
        "padding_mask": padded(torch.ones_like(whole)),
        "swapped": torch.tensor(int(swapped)),
    }
