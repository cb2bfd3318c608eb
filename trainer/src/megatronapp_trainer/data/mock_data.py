"""Training data without files: random tokens with a structure that a model can learn.

A sample is a function of (seed, split, global sample index) alone, so that every layout and every resume reads the
same. With probability 0.75 a token follows from the one before it; the loss can fall to about a third of its start.
"""

import functools
import itertools
from collections.abc import Iterator

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import DataIterators, HostMicrobatch
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.utils.keyed_generator import generator_of

_FOLLOWS = 0.75


def build_mock_iterators(config: TrainerConfig, layout: Layout, consumed_samples: int) -> DataIterators:
    """Build training, validation and test microbatches of this rank."""
    return DataIterators(
        train=mock_batches(config, layout, split=0, first_sample=consumed_samples),
        valid=_endless_evaluations(config, layout, split=1),
        test=_endless_evaluations(config, layout, split=2),
    )


def _endless_evaluations(config: TrainerConfig, layout: Layout, *, split: int) -> Iterator[HostMicrobatch]:
    """Repeat the microbatches of one evaluation, so that every evaluation sees the same samples."""
    stride = config.training.micro_batch_size * layout.data_size
    microbatches = config.logging.eval_iters * config.global_batch_size(layout.data_size) // stride
    while True:
        yield from itertools.islice(mock_batches(config, layout, split=split, first_sample=0), microbatches)


def mock_batches(config: TrainerConfig, layout: Layout, *, split: int, first_sample: int) -> Iterator[HostMicrobatch]:
    """Yield microbatches in the order of Megatron's sampler: replicas alternate."""
    size, seed = config.training.micro_batch_size, config.training.seed
    vocab, length = config.data.vocab_size or 1, config.model.seq_length
    sample = first_sample + layout.data_rank * size
    while True:
        rows = [mock_sample(f"{seed}:{split}:{sample + row}", vocab, length + 1) for row in range(size)]
        tokens = torch.stack(rows)
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(size, length),
            "position_ids": torch.arange(length).expand(size, -1),
        }
        sample += layout.data_size * size


def mock_sample(key: str, vocab_size: int, length: int) -> torch.Tensor:
    """Return one row of tokens, int64 [length]."""
    generator = generator_of(key)
    free = torch.randint(0, vocab_size, (length,), generator=generator)
    follows = torch.rand(length, generator=generator) < _FOLLOWS
    follows[0] = False
    place = torch.arange(length)
    begin = torch.where(follows, 0, place).cummax(0).values
    factor, offset = _followers(vocab_size, 1 << length.bit_length())[:, place - begin]
    tokens: torch.Tensor = (free[begin] * factor + offset) % vocab_size
    return tokens


@functools.lru_cache(maxsize=8)
def _followers(vocab_size: int, count: int) -> torch.Tensor:
    """Return factor and offset of the tokens that follow another one, from itself on, int64 [2, count].

    Token t is followed by 3 t + 1, modulo the vocabulary.
    """
    factors, offsets = [1 % vocab_size], [0]
    for _ in range(1, count):
        factors.append(factors[-1] * 3 % vocab_size)
        offsets.append((offsets[-1] * 3 + 1) % vocab_size)
    return torch.tensor([factors, offsets])
