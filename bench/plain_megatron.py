"""Plain megatron-core 0.16.1 as an anchor: its own layers, schedule, DDP and optimizer, no code of ours.

The configuration is the one of a user without Transformer Engine and Apex: the "local" layer spec, distributed
optimizer, bf16, and as with Megatron's flags no softmax in fp32. Used by gpu_layouts.py and bench_host.py next to our
trainer, in the same process and on the same data.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and the batch of a measurement."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    sequence: int = 2048
    vocabulary: int = 32768
    microbatch: int = 1
    global_batch: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the groups; data parallelism takes what is left of the world."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1

    @property
    def name(self) -> str:
        interleaved = f"x{self.chunks}" if self.chunks > 1 else ""
        return f"TP{self.tensor} PP{self.pipeline}{interleaved}"


def transformer_config(shape: Shape, layout: Layout, *, softmax_in_fp32: bool = False) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        batch_p2p_comm=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=softmax_in_fp32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        deallocate_pipeline_outputs=True,
    )


def build_chunks(
    shape: Shape, layout: Layout, config: TransformerConfig, device: str, initialize: Callable[[Any], None] | None
) -> list[Any]:
    chunks = []
    for chunk in range(layout.chunks):
        stage = chunk if layout.chunks > 1 else None
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            shape.vocabulary,
            shape.sequence,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        if initialize is not None:
            initialize(model)
        chunks.append(Float16Module(config, model.to(device)))
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return [
        DistributedDataParallel(config, settings, model, disable_bucketing=index > 0)
        for index, model in enumerate(chunks)
    ]


def causal_mask(length: int, device: str) -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, length, length, device=device), diagonal=1).bool()


class PlainTraining:
    """One layout, ready to step. `batch(sample)` gives the tokens [microbatch, sequence + 1] of a global sample."""

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        batch: Callable[[int], torch.Tensor],
        device: str = "cuda",
        *,
        softmax_in_fp32: bool = False,
        initialize: Callable[[Any], None] | None = None,
    ) -> None:
        """Build the model; `initialize` fills the weights of each chunk, by default they are megatron-core's."""
        self.shape, self.layout, self.device = shape, layout, device
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        self.config = transformer_config(shape, layout, softmax_in_fp32=softmax_in_fp32)
        self.chunks = build_chunks(shape, layout, self.config, device, initialize)
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            min_lr=1e-4,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(options, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        many = len(self.chunks) > 1
        self.config.no_sync_func = [c.no_sync for c in self.chunks] if many else self.chunks[0].no_sync
        self.mask = causal_mask(shape.sequence, device)
        self.positions = torch.arange(shape.sequence, device=device).unsqueeze(0)
        self.batch = batch

    def samples(self, step: int) -> Iterator[torch.Tensor]:
        replicas = parallel_state.get_data_parallel_world_size()
        mine = parallel_state.get_data_parallel_rank()
        for index in range(self.shape.global_batch // replicas):
            sample = self.batch(step * self.shape.global_batch + index * replicas + mine)
            yield sample.to(self.device, non_blocking=True)

    def forward(self, samples: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:  # noqa: ANN401
        tokens = next(samples)
        output = model(tokens[:, :-1].contiguous(), self.positions, self.mask, labels=tokens[:, 1:].contiguous())

        def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = per_token.float().mean()
            return mean, {"loss": mean.detach().clone()}  # the schedule divides the mean in place

        return output, loss

    def step(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Run a step; return the mean loss of each microbatch on the last stage."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        many = len(self.chunks) > 1
        replicas = parallel_state.get_data_parallel_world_size()
        reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=[self.samples(step) for _ in self.chunks] if many else self.samples(step),
            model=self.chunks if many else self.chunks[0],
            num_microbatches=self.shape.global_batch // self.shape.microbatch // replicas,
            seq_length=self.shape.sequence,
            micro_batch_size=self.shape.microbatch,
            forward_only=False,
        )
        self.optimizer.step()
        return reports
