"""megatron-core's dataset of masked texts, reading its tokens as the flags say."""

from typing import Any

from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset


class MaskedTextDataset(BERTMaskedWordPieceDataset):  # type: ignore[misc] # megatron-core carries no types
    """Samples of one or two texts of a document, with whole words masked.

    A sample is a function of its number and the seed, so that threads may read in any order.
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:  # noqa: ANN401 - untyped library
        """Open the token files, mapped or read as `--no-mmap-bin-files` says."""
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)
