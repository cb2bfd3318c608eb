"""Steps as the hub stores them, for tests of what happens to steps and not to their records."""

import numpy as np

from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.model import RANK_RECORD, JobLayout, StepRecords

LAYOUT = JobLayout.grid(pp=2)


def stored_step(step: int, *, attempt: int = 0, records: int = 0) -> StoredStep:
    """Return a whole step of a job with this layout, with records of zeros."""
    view = StepRecords(attempt=attempt, step=step, records=np.zeros(records, RANK_RECORD), comms={})
    values = np.zeros((len(METRICS), LAYOUT.world), np.float32)
    digest = StepDigest(attempt=attempt, step=step, start_real_ns=0, duration_ns=1, complete=True, values=values)
    return StoredStep(view=view, digest=digest, offsets_ns=np.zeros(LAYOUT.world, np.int64))
