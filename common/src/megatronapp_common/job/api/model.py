"""Types of the model, its layout over ranks, and its serving. An omitted field keeps the trainer's default."""

from typing import Annotated, Literal

from pydantic import Field

from megatronapp_common.job.api.base import ManifestModel
from megatronapp_common.names import SERVE_PORT

MAX_NODES = 4096
MAX_PROC_PER_NODE = 64
MAX_RANKS = MAX_NODES * MAX_PROC_PER_NODE
Count = Annotated[int, Field(ge=1, le=2_147_483_647)]
Size = Annotated[int, Field(ge=1, le=MAX_RANKS)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Model(ManifestModel):
    """Shape of the model."""

    type: Literal["gpt", "bert"] = "gpt"
    """Architecture."""
    num_layers: Count
    """Transformer layers."""
    hidden_size: Count
    """Width of the residual stream."""
    num_attention_heads: Count
    """Query heads."""
    seq_length: Count
    """Tokens of a sample."""
    ffn_hidden_size: Count | None = None
    """Width inside the MLP; defaults to 4 x hiddenSize, with swiglu to 8/3 x hiddenSize."""
    num_query_groups: Count | None = None
    """Key and value heads of grouped-query attention; defaults to the number of query heads."""
    kv_channels: Count | None = None
    """Width of one head; defaults to hiddenSize / numAttentionHeads."""
    max_position_embeddings: Count | None = None
    """Rows of learned positions; defaults to seqLength."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = None
    """Encoding of positions; defaults to learned_absolute."""
    rotary_base: Count | None = None
    """Base of the rotary frequencies; defaults to 10000."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a head's channels that rotate; defaults to 1."""
    normalization: Literal["LayerNorm", "RMSNorm"] | None = None
    """Kind of norm; defaults to LayerNorm."""
    norm_epsilon: Annotated[float, Field(gt=0)] | None = None
    """Term added to the variance by norms; defaults to 1e-5."""
    swiglu: bool = False
    """Use gated SiLU in the MLP instead of GELU."""
    untie_embeddings_and_output_weights: bool = False
    """Use separate weights for input embedding and output layer."""
    disable_bias_linear: bool = False
    """Use linear layers without bias."""
    add_qkv_bias: bool = False
    """Use a bias in the QKV projection although disableBiasLinear is true."""
    attention_dropout: Fraction | None = None
    """Dropout of attention probabilities; defaults to 0.1."""
    hidden_dropout: Fraction | None = None
    """Dropout of the residual branches; defaults to 0.1."""
    init_method_std: Annotated[float, Field(gt=0)] | None = None
    """Standard deviation of the initial weights; defaults to 0.02."""
    transformer_impl: Literal["torch", "local", "transformer_engine"] | None = None
    """Implementation of the layers; defaults to transformer_engine where it is installed, otherwise torch."""
    vocab_size: Count | None = None
    """Number of tokens before padding; defaults to the tokenizer's."""
    make_vocab_size_divisible_by: Count | None = None
    """Number of which the padded vocabulary is a multiple, for every layout; defaults to 128."""


class Parallelism(ManifestModel):
    """Sizes of the parallel groups. World size = tensor x context x pipeline x data."""

    tensor: Size = 1
    """Ranks that share each layer."""
    pipeline: Size = 1
    """Pipeline stages."""
    virtual_pipeline: Count | None = None
    """Model chunks of each rank: the interleaved schedule, with 2 or more."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, which also has the embedding; defaults to as many as the others."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, which also has the loss; defaults to as many as the others."""
    data: Count | None = None
    """Model replicas; derived from nodes x procPerNode by default."""
    context: Size = 1
    """Ranks that share one sequence."""
    expert: Size = 1
    """Replicas that share the experts (--num-experts in args)."""
    sequence_parallel: bool = False
    """Slice norms and dropout along the sequence within a tensor group."""


class Serve(ManifestModel):
    """Address and limits of a served model."""

    host: Annotated[str, Field(min_length=1, max_length=253)] = "127.0.0.1"
    """Address of the API without a cluster; anything but loopback admits other machines (with a token)."""
    port: Annotated[int, Field(ge=0, le=65535)] = SERVE_PORT
    """Port of the API without a cluster; 0: a free one. On a cluster it is always 8000."""
    max_batch: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of prompts that are generated together."""
    max_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 1024
    """Largest number of new tokens of a prompt."""
    max_length: Count | None = None
    """Largest number of tokens of a prompt and its answer, with memory for maxBatch of them; defaults to the positions
    of the training."""
    queue_length: Annotated[int, Field(ge=0, le=4096)] = 32
    """Prompts that wait; requests beyond get 429. A request may have maxBatch + queueLength texts."""
    prefill_chunk: Annotated[int, Field(ge=1, le=1_048_576)] = 512
    """Tokens of a prompt that are read in one forward pass; less needs less memory."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of weights and activations; defaults to the one of the training."""
