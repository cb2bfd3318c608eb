"""MegatronJob: its types, its rules, and its flags."""

from megatronapp_common.job.arguments import megatron_arguments, place_of
from megatronapp_common.job.judge import check_update
from megatronapp_common.job.load import load_job, parse_manifest
from megatronapp_common.job.metadata import Metadata
from megatronapp_common.job.model import Model, Parallelism
from megatronapp_common.job.spec import Analyzer, Backoff, EnvVar, Fault, RunPolicy, Spec, Trace
from megatronapp_common.job.status import (
    TERMINAL_PHASES,
    Condition,
    Failure,
    Phase,
    Progress,
    RankTable,
    RankTableEntry,
    ReplicaStatuses,
    Status,
)
from megatronapp_common.job.training import Checkpoint, Data, Recompute, Training
from megatronapp_common.job.types import MegatronJob
from megatronapp_common.job.world import World, derive_world

__all__ = [
    "TERMINAL_PHASES",
    "Analyzer",
    "Backoff",
    "Checkpoint",
    "Condition",
    "Data",
    "EnvVar",
    "Failure",
    "Fault",
    "MegatronJob",
    "Metadata",
    "Model",
    "Parallelism",
    "Phase",
    "Progress",
    "RankTable",
    "RankTableEntry",
    "Recompute",
    "ReplicaStatuses",
    "RunPolicy",
    "Spec",
    "Status",
    "Trace",
    "Training",
    "World",
    "check_update",
    "derive_world",
    "load_job",
    "megatron_arguments",
    "parse_manifest",
    "place_of",
]
