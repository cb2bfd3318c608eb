"""Flags whose behaviour is fixed."""

import dataclasses

from megatronapp_trainer.config.fields import option


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FixedConfig:
    """Flags of fixed behaviour, accepted so that command lines for Megatron run unchanged."""

    exit_signal_handler: bool = option(False, "SIGTERM saves at the next step boundary and ends with code 75")
    log_throughput: bool = option(False, "log lines include TFLOP/s")
    use_mcore_models: bool = option(False, "models are megatron-core's")
    use_cpu_initialization: bool = option(False, "initial weights do not depend on the layout")
    use_dist_ckpt: bool = option(False, "checkpoints are distributed ones")
    auto_detect_ckpt_format: bool = option(False, "the format is read from the checkpoint")
    ckpt_fully_parallel_save: bool = option(False, "all replicas write, each a part")
    no_ckpt_fully_parallel_save: bool = option(False, "no effect: all replicas write, each a part")
    ckpt_fully_parallel_load: bool = option(False, "each rank reads its own parts of a checkpoint")
    ckpt_assume_constant_structure: bool = option(False, "saves are planned again only if the tensors of a rank change")
    use_persistent_ckpt_worker: bool = option(False, "the writer of --async-save lasts as long as its rank")
    log_timers_to_tensorboard: bool = option(False, "event files have the time of each step")
    log_batch_size_to_tensorboard: bool = option(False, "event files have the batch size")
    log_validation_ppl_to_tensorboard: bool = option(False, "event files have the perplexity of evaluations")
    log_memory_to_tensorboard: bool = option(False, "event files have the memory of a GPU")
    no_barrier_with_level_1_timing: bool = option(False, "no timer has a barrier")
    no_rope_fusion: bool = option(False, "Transformer Engine's rotary kernel is not used")
    dataloader_type: str = option("single", "samples are read in one order", choices=("single",))
    no_masked_softmax_fusion: bool = option(False, "Megatron's own softmax kernels are not used")
    cross_entropy_loss_fusion: bool = option(False, "it is one kernel where there is a GPU, unless turned off")
    rerun_mode: str = option("disabled", "no step is computed again to test the hardware", choices=("disabled",))
    no_create_attention_mask_in_dataloader: bool = option(False, "masks are made only for --reset-attention-mask")
