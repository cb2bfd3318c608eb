"""`megatronapp delete` for jobs of this machine."""

import argparse

from megatronapp_operator.backends.process.state import lock, registry
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.backends.process.stopping import grace_s, stop_backend
from megatronapp_operator.errors import JobNotFoundError
from megatronapp_operator.plan import Phase


def main(arguments: argparse.Namespace) -> int:
    """Stop a job and delete it; return the exit code."""
    try:
        job = registry.view(arguments.job)
    except JobNotFoundError:
        if arguments.ignore_not_found:
            return 0
        raise
    if job.alive and not job.ended:
        print(_stopping(job, force=arguments.force), flush=True)
    delete(job, force=arguments.force)
    print(f'megatronjob.megatronapp.io "{job.name}" deleted')
    return 0


def delete(job: JobView, *, force: bool) -> None:
    """Stop a job, with `force` without a checkpoint, and remove its state; its checkpoints stay."""
    if job.alive:
        stop_backend(job, force=force)
    with lock.hold(job.paths.lock):
        registry.clean_up(job.paths)
        job.paths.remove()


def _stopping(job: JobView, *, force: bool) -> str:
    """Return the line that is printed before the wait, which may be long."""
    serves = job.document["spec"].get("mode") == "serve"
    if force:
        return "stopping at once" if serves else "stopping at once; no checkpoint is written"
    if serves and job.phase != Phase.RUNNING:  # it takes no requests
        return f"stopping; at most {grace_s(job):g} s"
    if serves:
        return f"stopping; open requests end with an error; at most {grace_s(job):g} s"
    if not job.document["spec"].get("checkpoint", {}).get("save"):
        return f"stopping; nothing is saved, as spec.checkpoint.save is not set; at most {grace_s(job):g} s"
    return f"stopping; a checkpoint is written; at most {grace_s(job):g} s"
