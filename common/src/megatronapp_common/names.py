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
ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Digest of what a worker pod was rendered from; pinned for the life of an attempt."""
ANNOTATION_EXCLUDED_NODES = f"{GROUP}/excluded-nodes"
"""Nodes that a worker pod was made to avoid because its job excluded them, separated by commas."""

COORDINATOR_PORT = 19400
"""Where worker 0 gathers the gang on a cluster; outside the range from which launchers take ports for torch."""
STATUS_PORT = 19401
"""Where the launcher of worker 0 tells rank table and progress on a cluster."""
SERVE_PORT = 8000
"""Where worker 0 answers requests to a served model on a cluster."""
HUB_PORT = 8080
OPERATOR_PORT = 8081
GATEWAY_PORT = 8080

UNSAVED_STOP = "as asked, without a checkpoint (no --save)"
"""Part of the last words of a rank that was asked to stop and has nowhere to save."""


class ReplicaType(enum.StrEnum):
    """What a pod of a job is for (LABEL_REPLICA_TYPE)."""

    WORKER = "worker"
    HUB = "hub"
    INIT = "init"


class RankOrder(enum.StrEnum):
    """By what workers are sorted before their ranks are numbered (Env.RANK_ORDER)."""

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
    """Life of the gang, counted from 0."""
    WORKER_INDEX = "MEGATRONAPP_WORKER_INDEX"
    """Index of this worker, counted from 0."""
    NUM_WORKERS = "MEGATRONAPP_NUM_WORKERS"
    """Workers in the gang."""
    PROC_PER_NODE = "MEGATRONAPP_PROC_PER_NODE"
    """Ranks of each worker, comma separated, in worker order."""
    COORDINATOR = "MEGATRONAPP_COORDINATOR"
    """host:port where worker 0 gathers the gang; the host is resolved again at every retry."""
    ADDRESS = "MEGATRONAPP_ADDRESS"
    """IPv4 address of this worker, when the backend knows it."""
    INTERFACE = "MEGATRONAPP_INTERFACE"
    """Name of the interface whose IPv4 address this worker gives to the gang, or a regular expression that matches the
    whole name; comes before all other ways to find an address."""
    NETWORK_STATUS = "MEGATRONAPP_NETWORK_STATUS"
    """Text of the pod's annotation k8s.v1.cni.cncf.io/network-status (JSON): the first attachment that is not the
    default one gives the address. Empty or absent: there is none."""
    RANK_ORDER = "MEGATRONAPP_RANK_ORDER"
    """In which order workers get their ranks: `RankOrder`; absent: index."""
    TOPOLOGY = "MEGATRONAPP_TOPOLOGY"
    """Values of this worker's topology labels, comma separated, from the widest to the narrowest; may be empty."""
    STATUS_PORT = "MEGATRONAPP_STATUS_PORT"
    """Port at which the launcher of worker 0 serves its status by HTTP; absent: it does not."""
    SERVE_ADDRESS = "MEGATRONAPP_SERVE_ADDRESS"
    """host:port at which rank 0 of a served model answers; comes before its flags --host and --port."""
    LOG_TO_STDOUT = "MEGATRONAPP_LOG_TO_STDOUT"
    """"1": every rank's lines also go to the launcher's stdout, each behind `[rank N] `."""
    PREFLIGHT = "MEGATRONAPP_PREFLIGHT"
    """JSON of what to look at before the ranks start; absent: nothing. It holds `spec.network.preflight` as it is
    (`enabled`, `timeoutSeconds`) and, where the backend knows them: `gpus` (devices that the container has), `shmBytes`
    (room that SHM_DIR must have), `rdma` (true: a port of InfiniBand must be up, and memlock unlimited), `hca` (which
    adapters, as NCCL_IB_HCA has them). What is left out is not looked at; the gang's addresses always are."""
    NODE_NAME = "MEGATRONAPP_NODE_NAME"
    """Name of the machine (or of the pretended one) that this worker runs on."""
    SECRET_FILE = "MEGATRONAPP_SECRET_FILE"
    """File with the job's secret (hex text), mode 0600; tokens are derived from it."""
    SHM_DIR = "MEGATRONAPP_SHM_DIR"
    """Directory of rings and pages; /dev/shm by default."""
    SHM_PREFIX = "MEGATRONAPP_SHM_PREFIX"
    """Prefix of this worker's files in SHM_DIR; unique per job, attempt and worker."""
    RUN_DIR = "MEGATRONAPP_RUN_DIR"
    """Directory for this worker's logs of this attempt."""
    TERMINATION_LOG = "MEGATRONAPP_TERMINATION_LOG"
    """File that receives the launcher's JSON outcome, at most 2 KiB."""
    HUB_URL = "MEGATRONAPP_HUB_URL"
    """http://host:port of the job's hub; empty or absent: there is none."""


class ExitCode(enum.IntEnum):
    """Exit codes of ranks and launchers. A launcher passes on the code of its first failing rank."""

    OK = 0
    OWN_FAILURE = 1
    """A rank of this worker failed by itself (also: died by a signal)."""
    USAGE = 64
    """Wrong flags or configuration: never heals by a restart."""
    DATA = 65
    """Corrupt, empty or missing training data: never heals by a restart."""
    NOT_FINITE = 66
    """The loss became NaN or Inf."""
    STORAGE = 67
    """A checkpoint or log could not be written."""
    RENDEZVOUS = 68
    """The gang did not gather: refused, duplicate, or too late."""
    PEER_LOST = 69
    """This worker stopped because a peer was lost; the evidence lies elsewhere."""
    SUPERSEDED = 70
    """Another life of the job, or another job, owns the checkpoint directory: a restart would take it back."""
    PREEMPTED = 75
    """Asked to stop (SIGTERM); a checkpoint was written at a step border. Starting again resumes."""


class ShmFile(enum.StrEnum):
    """Suffixes of the files under SHM_DIR; a file is SHM_PREFIX + '.' + suffix."""

    RANK_RING = "rank{rank}.ring"
    """Trace ring of one global rank."""
    WORKER_RING = "worker.ring"
    """Host and device counters of the launcher."""
    PROGRESS = "progress"
    """Page with the newest progress; written by the reporting rank."""
    CONTROL = "control"
    """Page with commands for the ranks of this worker; written by the agent."""
