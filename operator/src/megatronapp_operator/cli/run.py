"""`megatronapp run` for jobs of this machine."""

import argparse
import sys
from collections.abc import Callable, Sequence

from megatronapp_common.job import MegatronJob
from megatronapp_common.job.profiles.effective import LayeredJob
from megatronapp_operator.backends.process.cluster_only import without_effect
from megatronapp_operator.backends.process.preflight import preflight
from megatronapp_operator.backends.process.runner import run_detached, run_job
from megatronapp_operator.backends.process.settings_builder import build_commands
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.cli.follower import JobFollower
from megatronapp_operator.cli.manifest import BAD_MANIFEST_EXIT_CODE, print_problems, read_layered
from megatronapp_operator.cli.text.stop_messages import was_interrupted
from megatronapp_operator.errors import ManifestError
from megatronapp_operator.plan import Phase, Status

INTERRUPTED_EXIT_CODE = 130


def main(arguments: argparse.Namespace) -> int:
    """Run a job; return the exit code."""
    return start(lambda: read_job(arguments.file, arguments.profile, name=arguments.name), arguments)


def start(read: Callable[[], LayeredJob], arguments: argparse.Namespace) -> int:
    """Run the job that `read` returns, or print the problems of its ManifestError; return the exit code."""
    try:
        layered = read()
        job = layered.job
        commands = build_commands(job)
        preflight(job, commands.check)
    except ManifestError as error:
        print_problems(error)
        return BAD_MANIFEST_EXIT_CODE
    ignored = without_effect(job)
    if ignored is not None:
        print(f"note: {ignored}", file=sys.stderr)
    registry.views()  # cleans up after backends that were killed
    if arguments.detach:
        run_detached(layered, commands=commands)
        print(f"megatronjob.megatronapp.io/{job.metadata.name} created")
        return 0
    on_terminal = sys.stdout.isatty()
    follower = JobFollower(job, JobPaths.of(job.metadata.name), verbose=arguments.follow, retain_hub=on_terminal)
    status = run_job(layered, commands=commands, retain_hub=on_terminal, listener=follower)
    follower.finish(status)
    return exit_code(status)


def exit_code(status: Status) -> int:
    """Return the exit code for a script."""
    if status.phase is Phase.SUCCEEDED:
        return 0
    return INTERRUPTED_EXIT_CODE if was_interrupted(status) else 1


def read_job(file: str, profiles: Sequence[str], *, name: str | None) -> LayeredJob:
    """Read a job that this machine can run. Raises ManifestError, one problem a line."""
    layered = read_layered(file, profiles, name=name)
    runnable(layered.job)
    return layered


def runnable(job: MegatronJob) -> MegatronJob:
    """Return the job if this machine can run it. Raises ManifestError, one problem a line."""
    problems = []
    if job.spec.suspend:
        problems.append("spec.suspend: true would start nothing on this machine; omit it")
    if job.spec.run_policy.clean_pod_policy != "Running":
        problems.append("spec.runPolicy.cleanPodPolicy: this machine has no pods; omit it")
    if problems:
        raise ManifestError("\n".join(problems))
    return job
