"""Flags of the model's shape."""

import dataclasses
import re

from megatronapp_trainer.config.fields import option, turned_off_by

_WINDOW = re.compile(r"\(? ?(-?\d+), ?(-?\d+) ?\)?")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the model."""

    model_type: str = option("gpt", "architecture; default: gpt", choices=("gpt", "bert"))
    num_layers: int = option(0, "transformer layers (required)")
    hidden_size: int = option(0, "width of the residual stream (required)")
    num_attention_heads: int = option(0, "query heads (required)")
    seq_length: int = option(0, "tokens of a sample (required)")
    max_position_embeddings: int | None = option(
        None, "rows of learned positions, or longest context of others; default: --seq-length", bounds="[1, inf)"
    )
    ffn_hidden_size: int | None = option(
        None,
        "width inside the MLP; default: 4 x hidden, with --swiglu 8/3 x hidden rounded down to a multiple of 64",
        bounds="[1, inf)",
    )
    kv_channels: int | None = option(None, "width of one head; default: hidden / heads", bounds="[1, inf)")
    group_query_attention: bool = option(False, "share keys and values among groups of query heads")
    num_query_groups: int = option(1, "key and value heads with --group-query-attention")
    position_embedding_type: str = option(
        "learned_absolute", "how positions enter", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = option(10000, "base of the rotary frequencies")
    rotary_percent: float = option(1.0, "share of a head's channels that rotate", bounds="(0, 1]")
    use_rope_scaling: bool = option(False, "rotary frequencies for long contexts, as Llama 3.1 has them")
    rope_scaling_factor: float = option(8.0, "how much longer the context is, with --use-rope-scaling")
    window_size: str | None = option(
        None, "LEFT,RIGHT: a token attends to itself and LEFT tokens before it; RIGHT must be 0; default: all before it"
    )
    normalization: str = option("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = option(1e-5, "added to the variance", bounds="[0, inf)")
    swiglu: bool = option(False, "gated SiLU in the MLP instead of GELU")
    openai_gelu: bool = option(False, "GELU by its tanh approximation, as GPT-2 has it")
    add_bias_linear: bool = turned_off_by("--disable-bias-linear", "linear layers without bias")
    add_qkv_bias: bool = option(False, "bias of the QKV projection although --disable-bias-linear is given")
    untie_embeddings_and_output_weights: bool = option(False, "separate weights of input and output embedding")
    make_vocab_size_divisible_by: int = option(128, "the vocabulary is padded to a multiple of this in every layout")
    bert_binary_head: bool = turned_off_by(
        "--bert-no-binary-head", "BERT without the sentence-order loss; a sample is then a single text"
    )
    attention_dropout: float = option(0.1, "dropout of attention probabilities", bounds="[0, 1)")
    hidden_dropout: float = option(0.1, "dropout of the residual branches", bounds="[0, 1)")
    init_method_std: float = option(0.02, "standard deviation of the initial weights", bounds="[0, inf)")
    transformer_impl: str = option(
        "",
        "layers: torch (ours, fused attention of torch), local (megatron-core's) or transformer_engine; "
        "default: transformer_engine if it is installed, or torch",
        choices=("torch", "local", "transformer_engine"),
    )
    use_flash_attn: bool = option(False, "the fused attention that torch has for the device; it is taken anyway")
    attention_backend: str = option(
        "auto",
        "auto or flash: torch's fused attention; local: --transformer-impl local",
        choices=("auto", "flash", "local"),
    )
    attention_softmax_in_fp32: bool = option(False, "softmax of --transformer-impl local in fp32")

    @property
    def type(self) -> str:
        """Name of the family in `models.registry`, as `model.type` of the manifest."""
        return self.model_type

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Round a vocabulary up. The result does not depend on the layout, so checkpoints are valid for all layouts."""
        multiple = self.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple

    @property
    def has_dropout(self) -> bool:
        """Return whether passes of training draw dropout masks."""
        return self.hidden_dropout > 0 or self.attention_dropout > 0

    @property
    def heads_of_keys(self) -> int:
        """Return the number of key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Return the number of channels of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def mlp_width(self) -> int:
        """Return the number of channels inside the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return self.hidden_size * 8 // 3 // 64 * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def positions(self) -> int:
        """Return the rows of learned positions; of others the longest context that the model is meant for."""
        return self.max_position_embeddings or self.seq_length

    @property
    def window(self) -> tuple[int, int] | None:
        """Return the two numbers of the window; None without one. Raises ValueError if it is invalid."""
        if self.window_size is None:
            return None
        match = _WINDOW.fullmatch(self.window_size)
        if match is None:
            raise ValueError(f"{self.window_size!r} is not LEFT,RIGHT")
        return int(match[1]), int(match[2])

    @property
    def attention_window(self) -> int | None:
        """Return the number of previous tokens that a token attends to; None for all."""
        window = self.window
        return None if window is None or window[0] < 0 else window[0]
