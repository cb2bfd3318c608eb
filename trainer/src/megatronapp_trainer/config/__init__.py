"""The trainer's configuration: frozen dataclasses, from which the parser is made. Flags have Megatron's spelling."""

from megatronapp_trainer.config.checkpoint import CheckpointConfig
from megatronapp_trainer.config.data import DataConfig
from megatronapp_trainer.config.fbd import FbdConfig, ShipMode
from megatronapp_trainer.config.fixed import FixedConfig
from megatronapp_trainer.config.logging import LoggingConfig, TraceWindows
from megatronapp_trainer.config.model import ModelConfig
from megatronapp_trainer.config.optimizer import OptimizerConfig
from megatronapp_trainer.config.parallel import ParallelConfig
from megatronapp_trainer.config.parse import build_parser, parse
from megatronapp_trainer.config.precision import PrecisionConfig
from megatronapp_trainer.config.root import TrainerConfig
from megatronapp_trainer.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "FbdConfig",
    "FixedConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ShipMode",
    "TraceWindows",
    "TrainerConfig",
    "TrainingConfig",
    "build_parser",
    "parse",
]
