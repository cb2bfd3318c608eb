"""Ranks that make models with megatron-core alone and save them in the two ways of Megatron-LM."""

import pathlib
import queue
from types import SimpleNamespace
from typing import Any

VOCABULARY = 120
ROWS = 128
ITERATION = 20
TRAINING = "--seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 120"
SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"openai_gelu": False},
    "llama": {
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
    },
}


def arguments_of(name: str) -> dict[str, Any]:
    """The arguments of Megatron-LM that say what such a model is, with some that say nothing of it."""
    import torch
    from megatron.core.transformer.enums import AttnBackend

    return {
        **SIZES,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "kv_channels": 8,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": 1e-5,
        "bias_gelu_fusion": False,
        "add_bias_linear": True,
        "group_query_attention": False,
        "num_query_groups": 1,
        "vocab_size": None,
        "padded_vocab_size": ROWS,
        "num_experts": None,
        "tokenizer_type": "GPT2BPETokenizer",
        "params_dtype": torch.float32,
        "attention_backend": AttnBackend.auto,
        "window_size": None,
        **MODELS[name],
    }


def write(root: str, flags: str) -> dict[str, Any]:
    """Save each model under ROOT/NAME-torch_dist and ROOT/NAME-legacy; logits by name, on the last stage."""
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.parallel.seeds import seed_everything
    from megatronapp_trainer.training.build import layout_of

    model_flags = "--num-layers 4 --hidden-size 32 --num-attention-heads 4"
    config = parse(f"{TRAINING} {model_flags} {flags}".split())
    layout = layout_of(config)
    initialize_groups(config, layout, prepare_device(layout.local_rank))
    seed_everything(config, layout)
    found: dict[str, Any] = {}
    for name in MODELS:
        chunks = [_model(name, layout, chunk) for chunk in range(layout.virtual_size)]
        _save(pathlib.Path(root), name, chunks, layout)
        if layout.virtual_size == 1:
            found[name] = _logits(config, layout, chunks[0])
    destroy_groups()
    return found


def _model(name: str, layout: Any, chunk: int) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    arguments = arguments_of(name)
    torch.manual_seed(7 + 10 * layout.pipeline_rank + chunk)
    config = TransformerConfig(
        **SIZES,
        tensor_model_parallel_size=layout.tensor_size,
        pipeline_model_parallel_size=layout.pipeline_size,
        virtual_pipeline_model_parallel_size=layout.virtual_size if layout.virtual_size > 1 else None,
        pipeline_dtype=torch.float32,
        num_query_groups=arguments["num_query_groups"] if arguments["group_query_attention"] else 4,
        normalization=arguments["normalization"],
        gated_linear_unit=arguments.get("swiglu", False),
        activation_func=torch.nn.functional.silu if arguments.get("swiglu") else torch.nn.functional.gelu,
        add_bias_linear=arguments["add_bias_linear"],
        qk_layernorm=arguments.get("qk_layernorm", False),
        init_method_std=0.2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    spec = get_gpt_layer_local_spec(normalization=arguments["normalization"], qk_layernorm=config.qk_layernorm)
    model = GPTModel(
        config,
        spec,
        vocab_size=ROWS,
        max_sequence_length=16,
        pre_process=layout.is_first_stage and chunk == 0,
        post_process=layout.is_last_stage and chunk == layout.virtual_size - 1,
        share_embeddings_and_output_weights=not arguments.get("untie_embeddings_and_output_weights", False),
        position_embedding_type=arguments["position_embedding_type"],
        rotary_base=arguments.get("rotary_base", 10000),
        vp_stage=chunk if layout.virtual_size > 1 else None,
    )
    for number, (key, parameter) in enumerate(model.named_parameters()):
        if "q_layernorm" in key or "k_layernorm" in key:  # they begin with ones, alike in both
            generator = torch.Generator().manual_seed(number)
            torch.nn.init.normal_(parameter, 1.0, 0.3, generator=generator)
    return model


def _logits(config: Any, layout: Any, model: Any) -> Any:
    import convert_ranks as ranks

    run = SimpleNamespace(state=SimpleNamespace(chunks=[model]), config=config)
    return ranks.forward(run, layout, tokens())


def tokens() -> Any:
    """[B, S] of ids."""
    import torch

    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(3))


def _save(root: pathlib.Path, name: str, chunks: list[Any], layout: Any) -> None:
    import argparse

    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    common = {
        "args": argparse.Namespace(**arguments_of(name)),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "num_floating_point_operations_so_far": 0.0,
    }
    legacy, core = (root / f"{name}-{kind}" / f"iter_{ITERATION:07d}" for kind in ("legacy", "torch_dist"))
    stage = f"_{layout.pipeline_rank:03d}" if layout.pipeline_size > 1 else ""
    own = legacy / f"mp_rank_{layout.tensor_rank:02d}{stage}"
    own.mkdir(parents=True)
    core.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    states = {key: chunk.state_dict_for_save_checkpoint() for key, chunk in zip(names, chunks, strict=True)}
    torch.save(
        common | states | {"rng_state": [{"torch_rng_state": torch.get_rng_state()}]}, own / "model_optim_rng.pt"
    )
    states = {key: chunk.sharded_state_dict() for key, chunk in zip(names, chunks, strict=True)}
    shard = ShardedObject(
        "rng_state",
        [0],
        (layout.pipeline_size, layout.tensor_size),
        (layout.pipeline_rank, layout.tensor_rank),
        replica_id=layout.data_rank,
    )
    if not torch.cuda.is_available():
        # megatron-core's writer asks for a GPU in any case
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    # its queue between processes starts one that imports torch and outlives ranks; a save that waits needs none
    filesystem_async._results_queue = queue.SimpleQueue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(common | states | {"rng_state": shard}, str(core), sharded_strategy=strategy)
    for folder in (legacy, core):
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
