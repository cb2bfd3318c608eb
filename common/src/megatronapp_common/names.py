"""Names shared by all parts: API group, labels, environment of a worker, exit codes, files in shared memory."""

import enum

GROUP = "megatronapp.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "MegatronJob"

LABEL_JOB = f"{GROUP}/job-name"
LABEL_JOB_UID = f"{GROUP}/job-uid"
LABEL_REPLICA_TYPE = f"{GROUP}/replica-type"
LABEL_REPLICA_INDEX = f"{GROUP}/replica-index"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_SPARE = f"{GROUP}/spare"
"""Label `true` on the pod of a spare, until it takes the place of a worker."""
LABEL_ROLE = f"{GROUP}/role"
"""Role of the ranks of a worker pod: forward or backward; absent unless forward ranks have separate workers."""
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Digest of the rendered template of a worker pod; pinned for the life of an attempt."""
ANNOTATION_RESTART = f"{GROUP}/restart"
"""Restart of a worker in place (`attempt_order.AttemptOrder`); absent until its first one."""
ANNOTATION_SAVE = f"{GROUP}/save"
"""Request for a checkpoint (`save_request.SaveRequest`) on the pod of worker 0; absent until the first one."""
ANNOTATION_EXCLUDED_NODES = f"{GROUP}/excluded-nodes"
"""Nodes that a worker pod avoids because its job excluded them, separated by commas."""

COORDINATOR_PORT = 19400
"""Port at which worker 0 gathers the gang on a cluster; outside the range that launchers use for torch."""
STATUS_PORT = 19401
"""Port at which the launcher of worker 0 reports rank table and progress on a cluster."""
SERVE_PORT = 8000
"""Port at which worker 0 answers requests to a served model on a cluster."""
HUB_PORT = 8080
OPERATOR_PORT = 8081
DEFAULT_SHM_DIR = "/dev/shm"
"""Directory of rings and documents where Env.SHM_DIR is not set."""
CHECKPOINT_TRACKER = "latest_checkpointed_iteration.txt"
"""File of a checkpoint directory that names the newest one, as Megatron's tools read it."""
GATEWAY_AUDIENCE = f"{GROUP}/gateway"
"""Audience of tokens that were made for the gateway, and that no other server accepts."""
GATEWAY_PORT = 8080

UNSAVED_STOP = "as asked, without a checkpoint (no --save)"
"""Part of the last message of a rank that was stopped without a folder to save to."""
RANK_TABLE_FILE = "rank-table.json"
"""Table of ranks and workers in RUN_DIR, and key of one that is too long for the status in its ConfigMap."""


class ReplicaType(enum.StrEnum):
    """Purpose of a pod of a job (LABEL_REPLICA_TYPE)."""

    WORKER = "worker"
    HUB = "hub"
    INIT = "init"


class CloseCode(enum.IntEnum):
    """Codes with which servers close a WebSocket (RFC 6455 and its registry; those from 4000 on are ours)."""

    POLICY = 1008
    """Wrong token, origin or message."""
    FAULT = 1011
    RESTART = 1012
    """Connect again."""
    BUSY = 1013
    TOO_SLOW = 4008
    """The page did not keep up."""
    REPLACED = 4009
    """Another agent of the same worker has connected."""


class RankOrder(enum.StrEnum):
    """Key by which workers are sorted before their ranks are numbered (Env.RANK_ORDER)."""

    INDEX = "index"
    IP = "ip"
    """By IPv4 address, as a number."""
    TOPOLOGY = "topology"
    """By the values of the topology labels as text, then by index."""


class Env(enum.StrEnum):
    """Environment variables that a backend sets for launcher, agent and hub."""

    JOB = "MEGATRONAPP_JOB"
    """Name of the job."""
    JOB_UID = "MEGATRONAPP_JOB_UID"
    """Unique id of the job object; changes when a job of the same name is created again."""
    ATTEMPT = "MEGATRONAPP_ATTEMPT"
    """Number of the gang's life, from 0."""
    ATTEMPT_FILE = "MEGATRONAPP_ATTEMPT_FILE"
    """File from which launcher and agent read that they continue with another attempt (`attempt_order`): restart in
    place. Absent: they end with their attempt."""
    SAVE_FILE = "MEGATRONAPP_SAVE_FILE"
    """File from which the launcher reads requests for a checkpoint (`save_request`). Absent: there are none."""
    WORKER_INDEX = "MEGATRONAPP_WORKER_INDEX"
    """Index of this worker, counted from 0."""
    SPARE = "MEGATRONAPP_SPARE"
    """Set to 1: this worker is a spare with an index beyond those of the gang, until an order gives it one of these."""
    NUM_WORKERS = "MEGATRONAPP_NUM_WORKERS"
    """Workers in the gang."""
    PROC_PER_NODE = "MEGATRONAPP_PROC_PER_NODE"
    """Ranks of each worker, comma separated, in worker order."""
    COORDINATOR = "MEGATRONAPP_COORDINATOR"
    """host:port where worker 0 gathers the gang; the host is resolved again at every retry."""
    ADDRESS = "MEGATRONAPP_ADDRESS"
    """IPv4 address of this worker, if the backend knows it."""
    INTERFACE = "MEGATRONAPP_INTERFACE"
    """Name of the interface whose IPv4 address this worker reports to the gang, or a regular expression that matches
    the whole name; has precedence over all other ways to find an address."""
    NETWORK_STATUS = "MEGATRONAPP_NETWORK_STATUS"
    """Text of the pod's annotation k8s.v1.cni.cncf.io/network-status (JSON), of which the first attachment that is not
    the default one has the address. Empty or absent: no attachment."""
    RANK_ORDER = "MEGATRONAPP_RANK_ORDER"
    """Order in which workers are assigned their ranks: `RankOrder`; absent: index."""
    TOPOLOGY = "MEGATRONAPP_TOPOLOGY"
    """Values of this worker's topology labels, comma separated, from the widest to the narrowest; may be empty."""
    RANK_ROLE = "MEGATRONAPP_RANK_ROLE"
    """Passes that a rank of MegaFBD runs, forward or backward; the launcher sets it, and the rank compares it with its
    flags. Absent without MegaFBD."""
    STATUS_PORT = "MEGATRONAPP_STATUS_PORT"
    """Port at which the launcher of worker 0 serves its status by HTTP; absent: it does not."""
    SERVE_ADDRESS = "MEGATRONAPP_SERVE_ADDRESS"
    """host:port at which rank 0 of a served model answers; has precedence over its flags --host and --port."""
    LOG_TO_STDOUT = "MEGATRONAPP_LOG_TO_STDOUT"
    """Set to 1: every rank's lines also go to the launcher's stdout, each with the prefix `[rank N] `."""
    PREFLIGHT = "MEGATRONAPP_PREFLIGHT"
    """JSON of the checks before the ranks start; absent: none. It holds `spec.network.preflight` unchanged (`enabled`,
    `timeoutSeconds`) and, where the backend knows them: `gpus` (devices that the container has), `shmBytes` (space that
    SHM_DIR must have), `rdma` (true: a port of InfiniBand must be up, and memlock unlimited), `hca` (which adapters, as
    in NCCL_IB_HCA). Omitted entries are not checked; the gang's addresses always are."""
    NODE_NAME = "MEGATRONAPP_NODE_NAME"
    """Name of the node (real or simulated) that this worker runs on."""
    SECRET_FILE = "MEGATRONAPP_SECRET_FILE"
    """File with the job's secret (hex text), mode 0600; tokens are derived from it."""
    SHM_DIR = "MEGATRONAPP_SHM_DIR"
    """Directory of rings and documents; /dev/shm by default."""
    SHM_PREFIX = "MEGATRONAPP_SHM_PREFIX"
    """Prefix of this worker's files in SHM_DIR; unique per job, attempt and worker."""
    RUN_DIR = "MEGATRONAPP_RUN_DIR"
    """Directory for this worker's logs of this attempt."""
    TERMINATION_LOG = "MEGATRONAPP_TERMINATION_LOG"
    """File that receives the launcher's JSON outcome, at most 2 KiB."""
    HUB_URL = "MEGATRONAPP_HUB_URL"
    """http://host:port of the job's hub; empty or absent: no hub."""


class ExitCode(enum.IntEnum):
    """Exit codes of ranks and launchers. A launcher exits with the code of its first failing rank.

    Programs of users may have others, which pass but for those of signals (129 to 192): these are OWN_FAILURE.
    """

    OK = 0
    OWN_FAILURE = 1
    """A rank of this worker failed by itself, or died by a signal."""
    USAGE = 64
    """Wrong flags or configuration: a restart never helps."""
    DATA = 65
    """Corrupt, empty or missing training data: a restart never helps."""
    NOT_FINITE = 66
    """The loss became NaN or Inf."""
    STORAGE = 67
    """A checkpoint or log could not be written."""
    RENDEZVOUS = 68
    """The gang did not gather: refused, duplicate, or too late."""
    PEER_LOST = 69
    """This worker stopped because a peer was lost; the evidence is on another worker."""
    SUPERSEDED = 70
    """Another attempt, or another job, owns the checkpoint directory: a restart would take it back."""
    PREEMPTED = 75
    """Stopped by SIGTERM; a checkpoint was written at a step boundary. Starting again resumes."""


class ShmFile(enum.StrEnum):
    """Suffixes of the files under SHM_DIR; a file is SHM_PREFIX + '.' + suffix."""

    RANK_RING = "rank{rank}.ring"
    """Trace ring of one global rank."""
    WORKER_RING = "worker.ring"
    """Host and device counters of the launcher."""
    PROGRESS = "progress"
    """Document with the newest progress; written by the reporting rank."""
    CONTROL = "control"
    """Document with commands for the ranks of this worker; written by the agent."""
