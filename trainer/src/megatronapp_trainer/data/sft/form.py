"""Properties of samples of conversations. Needs neither torch nor numpy."""

import dataclasses

from megatronapp_trainer.data.vocabulary import VocabularyConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConversationForm:
    """How conversations become samples."""

    vocabulary: VocabularyConfig
    prompt_format: str
    sequence_length: int
    seed: int
    cache_path: str | None
