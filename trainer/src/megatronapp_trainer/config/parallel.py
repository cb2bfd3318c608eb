"""Flags of the layout over ranks and of communication."""

import dataclasses

from megatronapp_trainer.config.fields import option, turned_off_by

CONTEXT_EXCHANGES = ("p2p", "a2a")
"""Values of --cp-comm-type."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Layout of ranks and communication."""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer")
    pipeline_model_parallel_size: int = option(1, "pipeline stages")
    num_layers_per_virtual_pipeline_stage: int | None = option(None, "layers of one model chunk: interleaved schedule")
    num_virtual_stages_per_pipeline_rank: int | None = option(None, "model chunks per rank: interleaved schedule")
    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first stage besides the embedding; the others get equal parts of the rest"
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last stage besides the loss; the others get equal parts of the rest"
    )
    account_for_embedding_in_pipeline_split: bool = option(False, "count the embedding as a layer of the first stage")
    account_for_loss_in_pipeline_split: bool = option(False, "count the loss as a layer of the last stage")
    sequence_parallel: bool = option(False, "norms and dropout work on slices of the sequence within a tensor group")
    context_parallel_size: int = option(
        1, "ranks that share each sequence, with two chunks of its tokens each", bounds="[1, inf)"
    )
    cp_comm_type: tuple[str, ...] = option(
        ("p2p",),
        f"attention over the ranks that share a sequence: {', '.join(CONTEXT_EXCHANGES)}; p2p passes keys and values "
        "around a ring, a2a exchanges heads for tokens",
    )
    expert_model_parallel_size: int = option(
        1,
        "replicas that share the experts, each with a part of them; divides the number of replicas",
        bounds="[1, inf)",
    )
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that share an expert; only --tensor-model-parallel-size, the default"
    )
    use_distributed_optimizer: bool = option(False, "shard optimizer state over the replicas")
    overlap_grad_reduce: bool = option(False, "reduce gradients during the backward pass")
    overlap_param_gather: bool = option(False, "gather parameters during the forward pass")
    overlap_data_parallel: bool = turned_off_by(
        "--no-overlap-data-parallel",
        "reduce gradients and gather parameters between steps, also on GPUs whose graphs would overlap both",
    )
    ddp_bucket_size: int | None = option(
        None, "parameters per gradient bucket; default: megatron-core's", bounds="[1, inf)"
    )
    ddp_average_in_collective: bool = option(False, "average within the collective")
    overlap_p2p_comm: bool = turned_off_by(
        "--no-overlap-p2p-communication", "transfers of the interleaved schedule do not overlap compute"
    )
    distributed_backend: str = option("", "default: nccl on GPUs, gloo otherwise", choices=("nccl", "gloo"))
    ranks_per_gpu: int = option(
        1, "ranks of a node that share each GPU, to try a layout; above 1 only with gloo", bounds="[1, inf)"
    )
    distributed_timeout_minutes: float = option(
        10.0, "a collective that takes longer ends the process", bounds="(0, inf)"
    )

    def virtual_size(self, num_layers: int) -> int:
        """Return the number of model chunks per rank, 1 for a schedule that is not interleaved."""
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is not None:
            parts = self.pipeline_model_parallel_size * self.num_layers_per_virtual_pipeline_stage
            return (num_layers + self.counted_as_layers) // parts
        return 1

    @property
    def counted_as_layers(self) -> int:
        """Return how many of embedding and loss are counted as layers when layers are divided over stages."""
        return self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of each stage, including those counted for embedding and loss. Raises ValueError if they do
        not fit.
        """
        stages = self.pipeline_model_parallel_size
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        rest = num_layers + self.counted_as_layers - (first or 0) - (last or 0)
        middle = stages - (first is not None) - (last is not None)
        if rest < 0 or (rest % middle if middle > 0 else rest):
            raise ValueError(f"{rest} layers cannot be shared by {middle} stages")
        layers_of_middle = (rest // middle,) * middle if middle > 0 else ()
        return (*(() if first is None else (first,)), *layers_of_middle, *(() if last is None else (last,)))
