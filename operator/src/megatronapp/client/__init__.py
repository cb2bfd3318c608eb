"""MegatronJobs from Python: submit, wait, logs, status, verdicts, and traces as data frames.

    from megatronapp.client import Client

    with Client.cluster(namespace="research") as client:   # or Client.local()
        job = client.submit("job.yaml")
        print(job.wait().phase)
        with job.hub() as hub:
            print(hub.timeline().groupby("kind").duration_ns.sum())

Needs `megatronapp-operator[client]`: the official client of Kubernetes and pandas. How to begin: docs/python-client.md.
"""

from megatronapp.client.client import Client
from megatronapp.client.hub import Hub
from megatronapp.client.job import Job, Page
from megatronapp_operator.errors import (
    HubError,
    JobConflictError,
    JobNotFoundError,
    ManifestError,
    OperatorError,
)

__all__ = [
    "Client",
    "Hub",
    "HubError",
    "Job",
    "JobConflictError",
    "JobNotFoundError",
    "ManifestError",
    "OperatorError",
    "Page",
]
