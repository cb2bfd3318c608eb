"""The MegatronJob resource: its types, its rules, and its fields as flags of the trainer."""

from megatronapp_common.job.api.analyzer import Analyzer, AnalyzerVolume, SlowNode, SlowNodeCost, SlowRank
from megatronapp_common.job.api.cluster import (
    Initializer,
    ObjectReference,
    PodMetadata,
    PodTemplate,
    Resources,
    SharedMemory,
    Toleration,
    Volume,
)
from megatronapp_common.job.api.metadata import Metadata
from megatronapp_common.job.api.model import Model, Parallelism, Serve
from megatronapp_common.job.api.network import Network, Preflight, Rdma
from megatronapp_common.job.api.policy import (
    Backoff,
    Elastic,
    ExitCodes,
    FailureMatch,
    FailureRule,
    NodeExclusion,
    RunPolicy,
    Scheduling,
    TopologyRequest,
)
from megatronapp_common.job.api.progress import GangSize, Progress
from megatronapp_common.job.api.quantity import quantity_value
from megatronapp_common.job.api.runtimes import Dpp, Fbd, ForwardWorkers
from megatronapp_common.job.api.spec import EnvVar, Fault, Spec, Trace
from megatronapp_common.job.api.status import (
    TERMINAL_PHASES,
    Condition,
    ConditionType,
    EndedWorker,
    ExcludedNode,
    Failure,
    FailureAction,
    FbdRanks,
    Phase,
    PinnedSettings,
    RankTable,
    RankTableEntry,
    Replicas,
    Status,
)
from megatronapp_common.job.api.training import Checkpoint, Data, Recompute, Training
from megatronapp_common.job.arguments import megatron_arguments, place_of
from megatronapp_common.job.data_sizes import reduced_sizes, resized
from megatronapp_common.job.judge import check_update
from megatronapp_common.job.load import load_job, load_stored_job, manifest_text, parse_manifest, skipped_rules
from megatronapp_common.job.megatron_job import MegatronJob
from megatronapp_common.job.status import read_status, status_document
from megatronapp_common.job.world import WorkerGroup, World, derive_world

__all__ = [
    "TERMINAL_PHASES",
    "Analyzer",
    "AnalyzerVolume",
    "Backoff",
    "Checkpoint",
    "Condition",
    "ConditionType",
    "Data",
    "Dpp",
    "Elastic",
    "EndedWorker",
    "EnvVar",
    "ExcludedNode",
    "ExitCodes",
    "Failure",
    "FailureAction",
    "FailureMatch",
    "FailureRule",
    "Fault",
    "Fbd",
    "FbdRanks",
    "ForwardWorkers",
    "GangSize",
    "Initializer",
    "MegatronJob",
    "Metadata",
    "Model",
    "Network",
    "NodeExclusion",
    "ObjectReference",
    "Parallelism",
    "Phase",
    "PinnedSettings",
    "PodMetadata",
    "PodTemplate",
    "Preflight",
    "Progress",
    "RankTable",
    "RankTableEntry",
    "Rdma",
    "Recompute",
    "Replicas",
    "Resources",
    "RunPolicy",
    "Scheduling",
    "Serve",
    "SharedMemory",
    "SlowNode",
    "SlowNodeCost",
    "SlowRank",
    "Spec",
    "Status",
    "Toleration",
    "TopologyRequest",
    "Trace",
    "Training",
    "Volume",
    "WorkerGroup",
    "World",
    "check_update",
    "derive_world",
    "load_job",
    "load_stored_job",
    "manifest_text",
    "megatron_arguments",
    "parse_manifest",
    "place_of",
    "quantity_value",
    "read_status",
    "reduced_sizes",
    "resized",
    "skipped_rules",
    "status_document",
]
