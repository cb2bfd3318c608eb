"""Reasons of conditions, events and failures that the plan gives: values that programs may rely on.

Launchers (docs/contracts.md, section 3) and the cluster (OOMKilled, Evicted, ...) add others.
"""

JOB_CREATED = "JobCreated"
GANG_CREATED = "GangCreated"
GANG_OUTDATED = "GangOutdated"

PROFILE_APPLIED = "ProfileApplied"
PROFILE_NOT_FOUND = "ProfileNotFound"
PROFILE_INVALID = "ProfileInvalid"
PROFILE_REFUSED = "ProfileRefused"
NO_PROFILE = "NoProfile"

INITIALIZERS_RUNNING = "InitializersRunning"
INITIALIZERS_SUCCEEDED = "InitializersSucceeded"
INITIALIZER_FAILED = "InitializerFailed"
INITIALIZER_DISRUPTED = "InitializerDisrupted"

VOLUMES_UNFIT = "VolumesUnfit"
VOLUMES_FIT = "VolumesFit"

ALL_SCHEDULED = "AllScheduled"
SCHEDULING = "Scheduling"
QUEUED = "Queued"
UNSCHEDULABLE = "Unschedulable"
QUOTA_EXCEEDED = "QuotaExceeded"
POD_FORBIDDEN = "PodForbidden"
POD_DENIED = "PodDenied"
POD_INVALID = "PodInvalid"

TRAINING_BEGAN = "TrainingBegan"
SERVING = "Serving"
NO_PROGRESS_REPORTED = "NoProgressReported"

START_DEADLINE_EXCEEDED = "StartDeadlineExceeded"
NOT_GATHERED = "NotGathered"
"""Given by launchers, too."""
DEADLINE_EXCEEDED = "DeadlineExceeded"
PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
WORKER_FAILED = "WorkerFailed"
WORKER_LOST = "WorkerLost"
LOST_NODE = "LostNode"

WORKERS_HELD = "WorkersHeld"
WORKERS_GONE = "WorkersGone"

HUB_NOT_RUNNING = "HubNotRunning"
HUB_RUNS = "HubRuns"

RANK_HUNG = "RankHung"
PROGRESSING = "Progressing"
PROGRESS_UNKNOWN = "ProgressUnknown"

TOKEN_REFUSED = "TokenRefused"
TOKEN_ACCEPTED = "TokenAccepted"
KEY_UNKNOWN = "KeyUnknown"

SHARED_MEMORY_FULL = "SharedMemoryFull"
SHARED_MEMORY_FREE = "SharedMemoryFree"

PAUSED_BY_ORDER = "PausedByOrder"
PAUSE_ENDED = "PauseEnded"

SCOPE_CONTROL = "ScopeControl"

NODE_EXCLUDED = "NodeExcluded"
NODE_READMITTED = "NodeReadmitted"
SLOW_NODE_EXCLUDED = "SlowNodeExcluded"
SLOW_NODE_DETECTED = "SlowNodeDetected"
SLOW_NODE_CLEARED = "SlowNodeCleared"
NONE_SLOW = "NoneSlow"
SLOW_NODE_SWAPPED = "SlowNodeSwapped"
SWAP_WAITS = "SwapWaits"

SPARE_TOOK_OVER = "SpareTookOver"
NO_SPARE = "NoSpare"
SPARES_WAIT = "SparesWait"
SPARES_START = "SparesStart"

DATA_PARALLEL_REDUCED = "DataParallelReduced"
DATA_PARALLEL_GROWS = "DataParallelGrows"
DATA_PARALLEL_GROWN = "DataParallelGrown"
NODES_MISSING = "NodesMissing"
GROWS_AT_CHECKPOINT = "GrowsAtCheckpoint"
GROWTH_WITHDRAWN = "GrowthWithdrawn"
FULL_SIZE = "FullSize"

PROTECTED = "Protected"
BUDGET_REFUSED = "BudgetRefused"
CHECKPOINT_OLD = "CheckpointOld"
CHECKPOINT_YOUNG = "CheckpointYoung"
EVICTION_WAITS = "EvictionWaits"
EVICTIONS_ALLOWED = "EvictionsAllowed"

ALL_WORKERS_SUCCEEDED = "AllWorkersSucceeded"
RANK0_SUCCEEDED = "Rank0Succeeded"
SUSPENDED = "Suspended"
RESUMED = "Resumed"
