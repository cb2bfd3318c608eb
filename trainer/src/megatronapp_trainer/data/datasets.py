"""Datasets of training, validation and test, through megatron-core's classes."""

import logging
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from megatronapp_trainer.data.blend import Blend, parse_blend, split_fractions
from megatronapp_trainer.data.corpus_check import (
    LONGEST_SENTENCE,
    SPECIAL_IN_SAMPLE,
    CorpusFacts,
    check_ends,
    check_vocabulary,
    inspect_corpus,
    sentences_of_documents,
)
from megatronapp_trainer.data.index_cache import cache_directory, staged, without_process_group
from megatronapp_trainer.data.sft.conversations import check_conversations
from megatronapp_trainer.data.sft.form import ConversationForm
from megatronapp_trainer.data.vocabulary import MaskingVocabulary, Vocabulary
from megatronapp_trainer.errors import DataError, TrainerError
from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

log = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")
_PATH_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")


class SampleDataset(Protocol):
    """Numbered samples of `sequence` tokens, each a dictionary of tensors."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return tokens and labels [sequence] int64, loss_mask float32, position_ids int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingRequest:
    """Form of the samples of BERT."""

    probability: float
    """Probability of a token to be masked."""
    short_probability: float
    """Probability of a sample to be shorter than it could be."""
    has_pairs: bool
    """Samples are two texts in either order, of at least two sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRequest:
    """Description of the datasets to build."""

    blend: Blend | None
    blend_per_split: tuple[Blend | None, Blend | None, Blend | None] | None
    split: str
    samples: tuple[int, int | None, int]
    """Samples of training, validation and test; 0: not requested, None: all samples of validation, each once."""
    sequence_length: int
    seed: int
    cache_path: str | None
    mmap_bin_files: bool
    eod_mask_loss: bool
    reset_position_ids: bool
    reset_attention_mask: bool
    masking: MaskingRequest | None = None
    """Samples are texts with masked tokens, as BERT takes them; None: runs of tokens."""
    conversations: ConversationForm | None = None
    """Samples are packed conversations from files of JSON lines; None: from files of tokens."""
    separates_validation: bool = False
    """Each corpus of validation is a separate dataset."""
    marks_sources: bool = False
    """Samples have a `source`, the number of their corpus in `prefixes`."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return all corpora, each once."""
        blends = (self.blend, *(self.blend_per_split or ()))
        return tuple(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))

    def wants(self, split: int) -> bool:
        """Return True if this split (0 training, 1 validation, 2 test) will have data."""
        _, blend, (first, last) = self.parts()[split]
        return self.samples[split] != 0 and blend is not None and last > first

    def built_together(self) -> list["DatasetRequest"]:
        """Return requests that megatron-core can build: all splits, or without validation and then each of its sets."""
        if not self.separates_validation or self.blend_per_split is None or not self.wants(1):
            return [self]
        train, valid, test = self.blend_per_split
        assert valid is not None
        sets = [
            replace(
                self,
                blend_per_split=(None, Blend(prefixes=(prefix,), weights=None), None),
                samples=(0, self.samples[1], 0),
            )
            for prefix in valid.prefixes
        ]
        rest = replace(self, blend_per_split=(train, None, test), samples=(self.samples[0], 0, self.samples[2]))
        return [rest, *sets]

    def parts(self) -> list[tuple[str, Blend | None, tuple[float, float]]]:
        """Return name, corpora and range of fractions of each split."""
        if self.blend_per_split is not None:
            return [(name, blend, (0.0, 1.0)) for name, blend in zip(SPLITS, self.blend_per_split, strict=True)]
        train, valid, _ = split_fractions(self.split)
        bounds = (0.0, train, train + valid, 1.0)
        return [(name, self.blend, (bounds[i], bounds[i + 1])) for i, name in enumerate(SPLITS)]


def blends_from_flags(
    data_path: Sequence[str] | None, per_split: Sequence[Sequence[str] | None]
) -> tuple[Blend | None, tuple[Blend | None, Blend | None, Blend | None] | None]:
    """Parse the blend of `--data-path`, or those of `--train-data-path` and the flags of the other splits."""
    if data_path is not None:
        return parse_blend(data_path, "--data-path"), None
    train, valid, test = (
        parse_blend(arguments, flag) if arguments is not None else None
        for arguments, flag in zip(per_split, _PATH_FLAGS, strict=True)
    )
    return None, (train, valid, test)


def check_request(request: DatasetRequest, vocabulary: Vocabulary) -> None:
    """Check every corpus before megatron-core reads it.

    Raises:
        DataError: a corpus is missing, damaged, of another tokenizer, or too short for a requested split.
    """
    if request.conversations is not None:
        for path in request.prefixes:
            check_conversations(path)
        return
    facts = {prefix: inspect_corpus(prefix) for prefix in request.prefixes}
    for corpus in facts.values():
        check_tokens(corpus, vocabulary)
        check_size(request, corpus)


def check_training_has_data(request: DatasetRequest) -> None:
    """Raise DataError if training has no data."""
    if not request.wants(0):
        raise DataError("training has no data; give it a fraction with --split, or a --train-data-path")


def check_tokens(corpus: CorpusFacts, vocabulary: Vocabulary) -> None:
    """Raise DataError if the corpus was made with another tokenizer, has ids beyond the vocabulary, or has not the ends
    of documents that flags of the run need.
    """
    of_bert = {"flags": "--tokenizer-type and --vocab-file"} if isinstance(vocabulary, MaskingVocabulary) else {}
    check_vocabulary(
        corpus.prefix,
        vocab_size=vocabulary.vocab_size,
        digest=vocabulary.digest,
        token_type=corpus.token_type,
        **of_bert,
    )
    if vocabulary.eod >= 0:
        check_ends(corpus.prefix, eod=vocabulary.eod, lengths=corpus.lengths, token_type=corpus.token_type)


def check_size(request: DatasetRequest, corpus: CorpusFacts) -> None:
    """Raise DataError if a split that is requested of the corpus would have no sample."""
    if request.masking is None:
        check_length(request, corpus)
    else:
        check_sentences(request, corpus, least=2 if request.masking.has_pairs else 1)


def check_length(request: DatasetRequest, corpus: CorpusFacts) -> None:
    """Raise DataError if the corpus is too short for a split that is requested of it."""
    for (name, blend, (first, last)), samples in zip(request.parts(), request.samples, strict=True):
        if blend is None or corpus.prefix not in blend.prefixes or samples == 0 or last <= first:
            continue
        documents, tokens = corpus.tokens_between(first, last)
        if tokens < request.sequence_length + 1:
            raise DataError(
                f"the {name} part of {corpus.prefix} has {documents} of {corpus.documents} documents and "
                f"{tokens} tokens, fewer than one sample of {request.sequence_length} + 1; take more text, "
                "another --split, a shorter --seq-length, or --eval-iters 0 for no evaluation"
            )


def check_sentences(request: DatasetRequest, corpus: CorpusFacts, *, least: int) -> None:
    """Raise DataError if a split that is requested of the corpus has no document with the least number of sentences.

    megatron-core would look for such documents without end. It skips those with a sentence of more than 512 tokens.
    """
    sentences, longest = sentences_of_documents(corpus)
    usable = (sentences >= least) & ((longest <= LONGEST_SENTENCE) | (sentences == 1))
    for (name, blend, (first, last)), samples in zip(request.parts(), request.samples, strict=True):
        if blend is None or corpus.prefix not in blend.prefixes or samples == 0 or last <= first:
            continue
        begin, end = (round(fraction * float(len(sentences))) for fraction in (first, last))
        if not usable[begin:end].any():
            raise DataError(
                f"the {name} part of {corpus.prefix} has {end - begin} of {len(sentences)} documents, none with "
                f"{least} or more sentences of at most {LONGEST_SENTENCE} tokens; prepare the text with "
                "`megatronapp data prepare --split-sentences`, or take more text, another --split, or --eval-iters 0"
            )
    _warn_of_long_sequences(request, corpus)


def _warn_of_long_sequences(request: DatasetRequest, corpus: CorpusFacts) -> None:
    """Log how much of a corpus no sample has, because megatron-core cuts both ends of a sequence that is too long."""
    longest = request.sequence_length - SPECIAL_IN_SAMPLE
    sequences, tokens = corpus.tokens_beyond(longest)
    if sequences:
        log.warning(
            "%s: %d of %d sequences have more than %d tokens (--seq-length less %d) and are cut at both ends: %.1f %% "
            "of all tokens are not trained on; prepare the text with `megatronapp data prepare --split-sentences`, or "
            "take a longer --seq-length",
            corpus.prefix,
            sequences,
            len(corpus.lengths),
            longest,
            SPECIAL_IN_SAMPLE,
            100 * tokens / int(corpus.lengths.sum(dtype=np.int64)),
        )


def warn_of_repeated_order(request: DatasetRequest, train: SampleDataset | None) -> None:
    """Log that training reads corpora without weights more than once, each time in the same order."""
    _, blend, _ = request.parts()[0]
    needed = request.samples[0] or 0
    if request.conversations is not None or blend is None or train is None or len(blend.prefixes) == 1:
        return
    if blend.weights is None and needed > len(train):
        log.warning(
            "training takes %d samples, %.1f times those of its %d corpora, each time in the same order, because they "
            "have no weights; write WEIGHT PREFIX WEIGHT PREFIX ... with weights in proportion to their sizes to have "
            "another order in each epoch",
            needed,
            needed / len(train),
            len(blend.prefixes),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltDatasets:
    """Datasets of a run; None without a request or data."""

    train: SampleDataset | None
    valid: SampleDataset | None
    """None also where each corpus is a dataset of `valid_sets`."""
    test: SampleDataset | None
    valid_sets: tuple[SampleDataset, ...] = ()


def build_datasets(request: DatasetRequest, vocabulary: Vocabulary) -> BuiltDatasets:
    """Build the datasets of training, validation and test. Needs no process group.

    Raises:
        DataError: megatron-core cannot build them.
        StorageError: the index cache cannot be written.
    """
    if request.conversations is not None:
        return _conversation_datasets(request, request.conversations)
    with silence_megatron_imports():
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        if request.masking is None:
            kind = GPTDataset
        else:
            from megatronapp_trainer.data.bert.dataset import MaskedTextDataset

            kind = MaskedTextDataset
    with staged(cache_directory(request.cache_path, request.prefixes)) as stage, without_process_group():
        try:
            built = [
                BlendedMegatronDatasetBuilder(
                    kind, list(part.samples), lambda: True, _megatron_config(part, vocabulary, stage)
                ).build()
                for part in request.built_together()
            ]
        except (OSError, TrainerError):
            raise
        except Exception as error:  # asserts and ValueErrors of megatron-core and numpy
            raise DataError(
                f"cannot build samples from {', '.join(request.prefixes)}: {error or type(error).__name__}"
            ) from error
    (train, valid, test), *others = (
        [_marked(request, part.parts()[i][1], dataset) for i, dataset in enumerate(of)]
        for part, of in zip(request.built_together(), built, strict=True)
    )
    return BuiltDatasets(
        train=train, valid=valid, test=test, valid_sets=tuple(sets[1] for sets in others if sets[1] is not None)
    )


def _conversation_datasets(request: DatasetRequest, form: ConversationForm) -> BuiltDatasets:
    from megatronapp_trainer.data.sft.dataset import build_conversations

    def build(split: int, prefixes: Sequence[str]) -> SampleDataset:
        return build_conversations(prefixes, request.parts()[split][2], form, samples=request.samples[split])

    train, valid, test = (blend if request.wants(i) else None for i, (_, blend, _) in enumerate(request.parts()))
    valid_sets: tuple[SampleDataset, ...] = ()
    if request.separates_validation and valid is not None:
        valid_sets = tuple(build(1, (prefix,)) for prefix in valid.prefixes)
        valid = None
    return BuiltDatasets(
        train=None if train is None else build(0, train.prefixes),
        valid=None if valid is None else build(1, valid.prefixes),
        test=None if test is None else build(2, test.prefixes),
        valid_sets=valid_sets,
    )


def _marked(request: DatasetRequest, blend: Blend | None, dataset: Any) -> SampleDataset | None:  # noqa: ANN401 - untyped library
    """Return the dataset of a blend, whose samples name their corpus of the request if they shall."""
    if dataset is None or blend is None or not request.marks_sources:
        return cast("SampleDataset | None", dataset)
    return SourcedDataset(dataset, [request.prefixes.index(prefix) for prefix in blend.prefixes])


class SourcedDataset:
    """Samples of a blend with the number of their corpus as `source`."""

    def __init__(self, dataset: SampleDataset, sources: Sequence[int]) -> None:
        """Take a dataset, and the number of each of its corpora in their order."""
        self._dataset = dataset
        self._sources = sources

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._dataset[index]
        return {**sample, "source": self._sources[int(sample.get("dataset_id", 0))]}


def _megatron_config(request: DatasetRequest, vocabulary: Vocabulary, cache: pathlib.Path) -> Any:  # noqa: ANN401
    per_split = request.blend_per_split
    common: dict[str, Any] = dict(
        random_seed=request.seed,
        sequence_length=request.sequence_length,
        blend=request.blend.for_megatron() if request.blend is not None else None,
        blend_per_split=_drop_unrequested([blend and blend.for_megatron() for blend in per_split], request)
        if per_split
        else None,
        split=request.split if per_split is None else None,
        path_to_cache=str(cache),
        mmap_bin_files=request.mmap_bin_files,
        tokenizer=vocabulary,
    )
    config = _config_of(request, common)
    if config.split_matrix is not None:
        # megatron-core never ends counting epochs of a part that is empty, so parts not wanted must not be built.
        config.split_matrix = _drop_unrequested(config.split_matrix, request)
    return config


def _config_of(request: DatasetRequest, common: dict[str, Any]) -> Any:  # noqa: ANN401
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    if request.masking is not None:
        from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDatasetConfig

        return BERTMaskedWordPieceDatasetConfig(
            **common,
            masking_probability=request.masking.probability,
            short_sequence_probability=request.masking.short_probability,
            classification_head=request.masking.has_pairs,
            # as Megatron's pretrain_bert.py: whole words, and up to three of them together
            masking_max_ngram=3,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
        )
    return GPTDatasetConfig(
        **common,
        # Positions say where documents begin, for attention, too: a mask would have all pairs of tokens.
        reset_position_ids=request.reset_position_ids or request.reset_attention_mask,
        reset_attention_mask=False,
        eod_mask_loss=request.eod_mask_loss,
        create_attention_mask=False,
    )


def _drop_unrequested(parts: Sequence[T | None], request: DatasetRequest) -> list[T | None]:
    return [part if samples != 0 else None for part, samples in zip(parts, request.samples, strict=True)]
