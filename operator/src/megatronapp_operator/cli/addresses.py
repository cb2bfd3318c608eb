"""Where a job's hub listens, and the key to it."""

from megatronapp_common.tokens import Role, derive, read_secret
from megatronapp_operator.backends.process import files
from megatronapp_operator.backends.process.paths import JobPaths
from megatronapp_operator.errors import HubError


def hub_access(paths: JobPaths) -> tuple[str, str]:
    """Address of the hub and the viewer's token. Raises HubError if the job has no hub now."""
    hub = files.read_json(paths.hub)
    if hub is None:
        raise HubError(
            f"{paths.name}: no hub listens; it needs spec.analyzer.enabled: true, and ends with the job "
            "(after spec.analyzer.retainSeconds)"
        )
    return hub["url"], derive(read_secret(paths.secret), Role.VIEWER)


def page_address(paths: JobPaths) -> str:
    """Address of the pages with the viewer's token in it. Raises HubError if the job has no hub now."""
    url, token = hub_access(paths)
    return f"{url}/?token={token}"
