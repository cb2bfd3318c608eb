"""`megatronapp run`."""

import argparse
import pathlib
import sys

from megatronapp_common.errors import JobError
from megatronapp_common.job import MegatronJob, load_job, parse_manifest
from megatronapp_operator.backends.process import registry
from megatronapp_operator.backends.process.build import build_commands
from megatronapp_operator.backends.process.paths import JobPaths
from megatronapp_operator.backends.process.preflight import preflight
from megatronapp_operator.backends.process.runner import run_detached, run_job
from megatronapp_operator.cli.follower import Follower
from megatronapp_operator.cli.stop_words import interrupted
from megatronapp_operator.errors import ManifestError
from megatronapp_operator.plan import Phase, Status

BAD_MANIFEST_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
WHOLE = "the document: "


def main(arguments: argparse.Namespace) -> int:
    """Run a job; returns the exit code."""
    try:
        job = read_job(arguments.file, name=arguments.name)
        commands = build_commands(job)
        preflight(job, commands.check)
    except ManifestError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return BAD_MANIFEST_EXIT_CODE
    registry.views()  # cleans up after backends that were killed
    if arguments.detach:
        run_detached(job, commands=commands)
        print(f"megatronjob.megatronapp.io/{job.metadata.name} created")
        return 0
    on_terminal = sys.stdout.isatty()
    follower = Follower(job, JobPaths.of(job.metadata.name), verbose=arguments.follow, retain_hub=on_terminal)
    status = run_job(job, commands=commands, retain_hub=on_terminal, listener=follower)
    follower.finish(status)
    return exit_code(status)


def exit_code(status: Status) -> int:
    """What a script wants to know."""
    if status.phase is Phase.SUCCEEDED:
        return 0
    return INTERRUPTED_EXIT_CODE if interrupted(status) else 1


def read_job(file: str, *, name: str | None) -> MegatronJob:
    """The job in a file (or '-'). Raises ManifestError, one problem a line."""
    try:
        document = parse_manifest(_read(file))
        if name is not None and isinstance(document, dict) and isinstance(document.get("metadata"), dict):
            document["metadata"]["name"] = name
        job = load_job(document)
    except JobError as error:
        raise ManifestError(_named(str(error), "standard input" if file == "-" else file)) from error
    problems = []
    if job.spec.suspend:
        problems.append("spec.suspend: true would start nothing on this machine; leave it out")
    if job.spec.run_policy.clean_pod_policy != "Running":
        problems.append("spec.runPolicy.cleanPodPolicy: there are no pods on this machine; leave it out")
    if problems:
        raise ManifestError("\n".join(problems))
    return job


def _named(problems: str, file: str) -> str:
    """Problems of the document as a whole are told with the file's name; others begin with a field."""
    lines = (line.replace("the document: is not YAML: ", "the document: ", 1) for line in problems.splitlines())
    return "\n".join(f"{file}: {rest}" if (rest := line.removeprefix(WHOLE)) != line else line for line in lines)


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return pathlib.Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ManifestError(f"{file}: cannot read the manifest: {reason}") from error
