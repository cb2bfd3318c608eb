"""The trainer's configuration: frozen dataclasses, from which the parser is made. Flags have Megatron's spelling."""

from megatronapp_trainer.config.model import ModelConfig, ParallelConfig, PrecisionConfig
from megatronapp_trainer.config.parse import build_parser, parse
from megatronapp_trainer.config.root import TrainerConfig
from megatronapp_trainer.config.training import (
    CheckpointConfig,
    DataConfig,
    FixedConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "FixedConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainerConfig",
    "TrainingConfig",
    "build_parser",
    "parse",
]
