"""Jobs of this machine, or of a namespace of a cluster."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from megatronapp.client.job import Job, JobPlace
from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, load_job
from megatronapp_common.job.profiles.effective import load_layered_job
from megatronapp_operator.cli.manifest import read_document, read_profile, with_source
from megatronapp_operator.errors import ManifestError

Manifest = MegatronJob | Mapping[str, Any] | str | os.PathLike[str]


class Client:
    """Jobs of one place. Use `Client.local()` or `Client.cluster()`; close it, or use it in `with`."""

    def __init__(self, place: JobPlace) -> None:
        self._place = place

    @classmethod
    def local(cls) -> Self:
        """Return a client for jobs of this user on this machine, those that `megatronapp run` starts."""
        from megatronapp.client.local import LocalJobs

        return cls(LocalJobs())

    @classmethod
    def cluster(
        cls,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        gateway: str | None = None,
        service_account: str | None = None,
    ) -> Self:
        """Return a client for the jobs of a namespace, with the rights of the kubeconfig's user.

        Args:
            namespace: of the jobs; that of the context by default.
            context: of the kubeconfig; $MEGATRONAPP_CONTEXT or the current context by default.
            kubeconfig: file; $KUBECONFIG or ~/.kube/config by default, and in a pod its service account.
            gateway: URL or NAMESPACE/SERVICE of the gateway, through which hubs are read; discovered by default.
            service_account: [NAMESPACE/]NAME of an account whose token logs in at the gateway.

        Raises:
            OperatorError: there is no such kubeconfig or context, or `kubernetes` is not installed.
        """
        from megatronapp.client.cluster import ClusterNamespace
        from megatronapp_operator.cli.cluster.connection import ClusterSelection, connect

        selection = ClusterSelection(
            kubeconfig=kubeconfig,
            context=context,
            namespace=namespace,
            gateway=gateway,
            service_account=service_account,
        )
        return cls(ClusterNamespace(connect(selection)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection to the API server; jobs continue."""
        self._place.close()

    def submit(self, manifest: Manifest, *, profiles: Sequence[str | os.PathLike[str]] = ()) -> Job:
        """Store a job on the cluster, or start it on this machine, where it outlives this process; return it.

        `manifest`: a MegatronJob, a document, or the path of a file. On a cluster a job of this name is changed, on
        this machine one that has ended is replaced. `profiles`: on this machine, files of profiles that the job is
        merged over; a cluster has its own.

        Raises:
            ManifestError: the manifest or a profile has problems, one a line.
            JobConflictError: a job of this name, or with this checkpoint folder, runs on this machine, or a job of this
                name has ended on the cluster.
        """
        files = [str(pathlib.Path(profile)) for profile in profiles]
        document, source = _document(manifest)
        return Job(self._place, self._place.submit(_load(document, source, files), document, files))

    def job(self, name: str) -> Job:
        """Return the job of this name. Raises JobNotFoundError."""
        return Job(self._place, self._place.view(name).name)

    def jobs(self) -> list[Job]:
        """Return all jobs, by name."""
        return [Job(self._place, view.name) for view in self._place.views()]


def _document(manifest: Manifest) -> tuple[Any, str]:
    """Return a manifest as plain data, and where it is from. Raises ManifestError."""
    if isinstance(manifest, str | os.PathLike):
        path = str(pathlib.Path(manifest))
        if path == "-":
            raise ManifestError("-: standard input is for the command line; give the document, or the path of a file")
        return read_document(path), path
    if isinstance(manifest, MegatronJob):
        return manifest.model_dump(mode="json", by_alias=True, exclude_unset=True), ""
    if not isinstance(manifest, Mapping):
        raise ManifestError(f"{manifest!r} is no manifest; give a MegatronJob, a document, or the path of a file")
    return dict(manifest), ""


def _load(document: Any, source: str, profiles: Sequence[str]) -> MegatronJob:  # noqa: ANN401 - plain data
    """Return the job, with its rules checked. Raises ManifestError."""
    found = [read_profile(profile) for profile in profiles]
    try:
        return load_layered_job(document, found).job if found else load_job(document)
    except JobError as error:
        raise ManifestError(with_source(str(error), source) if source else str(error)) from error
