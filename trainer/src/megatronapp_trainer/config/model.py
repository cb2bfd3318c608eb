"""Flags of the model's shape."""

import ast
import dataclasses
import re

from megatronapp_trainer.config.fields import option, turned_off_by

_WINDOW = re.compile(r"\(? ?(-?\d+), ?(-?\d+) ?\)?")
_MAX_PATTERN = 10_000
"""Longest list of --moe-layer-freq: no model has as many layers."""
BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
"""Ways to balance the load of experts, of which the first three add a loss."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Layers with a mixture of experts."""

    num_experts: int | None = option(
        None, "experts of each layer that --moe-layer-freq selects; default: no experts", bounds="[1, inf)"
    )
    moe_layer_freq: str = option(
        "1", "layers with experts: N for every Nth from the first on, or a list of 0 and 1 such as '[0]*1+[1]*23'"
    )
    moe_ffn_hidden_size: int | None = option(
        None, "width inside an expert; default: --ffn-hidden-size", bounds="[1, inf)"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "width of a shared expert, which every token passes; default: none", bounds="[1, inf)"
    )
    moe_shared_expert_gate: bool = option(False, "the shared expert is weighted by a sigmoid of the token")
    moe_router_topk: int = option(2, "experts of each token", bounds="[1, inf)")
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        f"balance of the experts' load: {', '.join(BALANCING)}; several of the losses may be given, each with its "
        "coefficient",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option((0.0,), "coefficient of the loss that balances the load of experts")
    moe_z_loss_coeff: float | None = option(
        None, "coefficient of the loss that holds the router's logits small, such as 1e-3", bounds="[0, inf)"
    )
    moe_router_score_function: str = option(
        "softmax", "how the router's logits become scores", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = option(False, "softmax over all experts before the best are chosen, not over those")
    moe_router_topk_scaling_factor: float | None = option(
        None, "factor of the scores of the chosen experts", bounds="(0, inf)"
    )
    moe_router_num_groups: int | None = option(
        None, "groups of experts, of which each token uses --moe-router-group-topk", bounds="[1, inf)"
    )
    moe_router_group_topk: int | None = option(None, "groups of experts of each token", bounds="[1, inf)")
    moe_router_enable_expert_bias: bool = option(
        False, "a bias of each expert, moved after every step against its load, takes part in the choice"
    )
    moe_router_bias_update_rate: float = option(1e-3, "how far a step moves that bias", bounds="[0, inf)")
    moe_router_dtype: str | None = option(
        None, "precision of logits and weighted sum; default: that of the model", choices=("fp32", "fp64")
    )
    moe_input_jitter_eps: float | None = option(
        None, "the router's input is multiplied by random numbers from 1 - EPS to 1 + EPS", bounds="(0, 1)"
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "an expert takes at most this times the mean number of tokens, and drops the others; default: all tokens",
        bounds="(0, inf)",
    )
    moe_pad_expert_input_to_capacity: bool = option(False, "experts with fewer tokens are padded to their capacity")
    moe_token_drop_policy: str = option(
        "probs", "tokens to drop: those of the lowest scores, or the last ones", choices=("probs", "position")
    )
    moe_grouped_gemm: bool = option(
        False, "products of all experts of a rank in one kernel: bf16 on GPUs; elsewhere expert by expert"
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        "how tokens reach experts of other ranks; alltoall sends each token only where it is needed",
        choices=("allgather", "alltoall"),
    )

    @property
    def balancing_losses(self) -> tuple[str, ...]:
        """Return the losses that balance the load, except those with a coefficient of 0."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return tuple(name for name, coefficient in pairs if name in BALANCING[:3] and coefficient > 0)

    def expert_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts. Raises ValueError for an invalid --moe-layer-freq."""
        if self.num_experts is None:
            return (False,) * num_layers
        text = self.moe_layer_freq.strip()
        if text.isdecimal():
            every = int(text)
            if every < 1:
                raise ValueError("it must be 1 or more")
            return tuple(layer % every == 0 for layer in range(num_layers))
        pattern = _pattern(text)
        if len(pattern) != num_layers:
            raise ValueError(f"it has {len(pattern)} layers, and the model {num_layers}")
        if set(pattern) - {0, 1}:
            raise ValueError("only 0 (no experts) and 1 (experts) may be in it")
        return tuple(value == 1 for value in pattern)


def _pattern(text: str) -> list[int]:
    """Evaluate lists of numbers, their sums and multiples, as in ``[0]+[1]*3``. Raises ValueError for others."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError("it is neither a number nor a list") from error
    value = _evaluated(tree)
    if not isinstance(value, list):
        raise ValueError("it is neither a number nor a list")
    return value


def _times(length: int, times: int) -> int:
    """Return how often a list is repeated. Raises ValueError if the result were longer than any model."""
    if length * times > _MAX_PATTERN:
        raise ValueError(f"it is a list of {length * times} layers")
    return times


def _evaluated(node: ast.expr) -> list[int] | int:
    """Return the value of a part of a pattern."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            numbers = [_evaluated(element) for element in elements]
            return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(operator, ast.Add) and isinstance(first, list) and isinstance(second, list):
                return first + second
            if isinstance(operator, ast.Mult) and isinstance(first, list) and isinstance(second, int):
                return first * _times(len(first), second)
    raise ValueError("it is neither a number nor a list such as '[0]*1+[1]*23'")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(ExpertsConfig):
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
    qk_layernorm: bool = option(False, "norms of each head's queries and keys, of the same kind, before they rotate")
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
        "torch's fused attention: fused: cuDNN's first; flash: FlashAttention first; auto: cuDNN's for plain causal "
        "attention without dropout, FlashAttention otherwise; local: --transformer-impl local",
        choices=("auto", "flash", "fused", "local"),
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
    def expert_width(self) -> int:
        """Return the number of channels inside an expert."""
        return self.moe_ffn_hidden_size or self.mlp_width

    @property
    def layers_with_experts(self) -> int:
        """Return the number of layers that have experts."""
        return sum(self.expert_layers(self.num_layers))

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
