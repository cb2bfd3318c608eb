"""The sizes of a model, as the tables of names and the pure functions on tensors ask for them."""

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
        """Width of the residual stream."""
        return self.model.hidden_size

    @property
    def mlp(self) -> int:
        """Channels inside the MLP."""
        return self.model.mlp_width

    @property
    def queries(self) -> int:
        """Rows of the query projection."""
        return self.model.num_attention_heads * self.model.head_width

    @property
    def keys(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.model.heads_of_keys * self.model.head_width

    @property
    def groups(self) -> int:
        """Key and value heads, each with its group of query heads."""
        return self.model.heads_of_keys

    @property
    def padded_vocab_size(self) -> int:
        """Rows of our embedding."""
        multiple = self.model.make_vocab_size_divisible_by
        return -(-self.vocab_size // multiple) * multiple

    def trainer_config(self, *, bf16: bool = False) -> TrainerConfig:
        """This model as the trainer's configuration, with nothing said of training."""
        return TrainerConfig(
            model=self.model, data=DataConfig(vocab_size=self.vocab_size), precision=PrecisionConfig(bf16=bf16)
        )
