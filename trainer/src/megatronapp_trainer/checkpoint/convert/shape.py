"""Sizes of a model for the tables of names and the pure functions on tensors."""

import dataclasses

from megatronapp_trainer.config import DataConfig, ModelConfig, PrecisionConfig, TrainerConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model and its vocabulary."""

    model: ModelConfig
    vocab_size: int
    """Tokens, without padding."""

    @property
    def hidden(self) -> int:
        """Return the width of the residual stream."""
        return self.model.hidden_size

    @property
    def mlp(self) -> int:
        """Return the number of channels inside the MLP."""
        return self.model.mlp_width

    @property
    def queries(self) -> int:
        """Return the number of rows of the query projection."""
        return self.model.num_attention_heads * self.model.head_width

    @property
    def keys(self) -> int:
        """Return the number of rows of the key projection, and of the value projection."""
        return self.model.heads_of_keys * self.model.head_width

    @property
    def groups(self) -> int:
        """Return the number of key and value heads, each with its group of query heads."""
        return self.model.heads_of_keys

    @property
    def padded_vocab_size(self) -> int:
        """Return the number of rows of our embedding."""
        return self.model.padded_vocab_size(self.vocab_size)

    def trainer_config(self, *, precision: str = "fp32") -> TrainerConfig:
        """Return this model as the trainer's configuration, without settings of training."""
        return TrainerConfig(
            model=self.model,
            data=DataConfig(vocab_size=self.vocab_size),
            precision=PrecisionConfig(bf16=precision == "bf16", fp16=precision == "fp16"),
        )
