"""The configuration with all its sections."""

import dataclasses

from megatronapp_common.topology import FbdWorld, RankRole, Topology
from megatronapp_trainer.config.checkpoint import CheckpointConfig
from megatronapp_trainer.config.data import DataConfig
from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.config.fbd import AUTO, FbdConfig, ShipMode
from megatronapp_trainer.config.fixed import FixedConfig
from megatronapp_trainer.config.logging import LoggingConfig, WatchConfig
from megatronapp_trainer.config.model import ModelConfig
from megatronapp_trainer.config.optimizer import OptimizerConfig
from megatronapp_trainer.config.parallel import ParallelConfig
from megatronapp_trainer.config.precision import KernelConfig, PrecisionConfig
from megatronapp_trainer.config.training import ControlConfig, TrainingConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The one configuration of a training run."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    dpp: DppConfig = dataclasses.field(default_factory=DppConfig)
    fbd: FbdConfig = dataclasses.field(default_factory=FbdConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    kernels: KernelConfig = dataclasses.field(default_factory=KernelConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    control: ControlConfig = dataclasses.field(default_factory=ControlConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    watch: WatchConfig = dataclasses.field(default_factory=WatchConfig)
    always: FixedConfig = dataclasses.field(default_factory=FixedConfig)

    @property
    def virtual_size(self) -> int:
        """Return the number of model chunks per rank."""
        return self.parallel.virtual_size(self.model.num_layers)

    @property
    def is_vee(self) -> bool:
        """Return True if stages are placed in a vee, as ZB-V has them: the first rank holds both ends of the model."""
        return self.dpp.is_vee(self.virtual_size)

    @property
    def schedule(self) -> str:
        """Return the name of the pipeline schedule in `pipeline.registry`."""
        return "dynamic" if self.dpp.use_dpp else "static"

    def fbd_world(self, world_size: int) -> FbdWorld | None:
        """Return the ranks of both roles with MegaFBD, None without. Raises UsageError if they do not fit the world."""
        return self.fbd.world(world_size, self.parallel) if self.fbd.enabled else None

    @property
    def ship_modes(self) -> tuple[ShipMode, ...]:
        """Return the modes of shipping of MegaFBD, that of the first steps first; several only with `auto`."""
        given = self.fbd.fbd_ship
        if given == AUTO:
            return tuple(ShipMode)
        return (ShipMode(given or self.precision.granularity or ShipMode.SAVED),)

    def world_size(self, data_size: int) -> int:
        """Return the number of ranks that train this number of replicas."""
        trained = Topology(
            tensor=self.parallel.tensor_model_parallel_size,
            context=self.parallel.context_parallel_size,
            pipeline=self.parallel.pipeline_model_parallel_size,
            data=data_size,
        )
        if not self.fbd.enabled:
            return trained.world_size
        served = self.fbd.fbd_backward_per_forward
        return FbdWorld(trained=trained, merged=self.fbd.merged, backward_per_forward=served).world_size

    def of_role(self, role: RankRole) -> "TrainerConfig":
        """Return the configuration with the sizes of a role's layers: merged forward ranks have whole ones."""
        if role is not RankRole.FORWARD or not self.fbd.merged:
            return self
        parallel = dataclasses.replace(self.parallel, tensor_model_parallel_size=1, sequence_parallel=False)
        return dataclasses.replace(self, parallel=parallel)

    def global_batch_size(self, data_size: int) -> int:
        """Return the samples of one step after a ramp-up."""
        return self.training.global_batch_size or self.training.micro_batch_size * data_size

    def most_microbatches(self, data_size: int) -> int:
        """Return the microbatches of one step of a replica after a ramp-up."""
        return self.global_batch_size(data_size) // self.training.micro_batch_size // data_size
