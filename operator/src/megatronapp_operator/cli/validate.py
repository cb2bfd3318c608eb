"""`megatronapp validate`, which needs no cluster."""

import argparse
from collections.abc import Sequence

from megatronapp_common.job import MegatronJob
from megatronapp_operator.cli.manifest import BAD_MANIFEST_EXIT_CODE, print_problems, read_layered, read_manifest
from megatronapp_operator.errors import ManifestError, OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Check manifests as the API server does; return the exit code."""
    if arguments.files.count("-") > 1:
        raise OperatorError("standard input can be read only once; write - once")
    code, several = 0, len(arguments.files) > 1
    for file in arguments.files:
        try:
            job = read_layered(file, arguments.profile).job if arguments.profile else read_manifest(file)
        except ManifestError as error:
            print_problems(error, file=file if several else None)
            code = BAD_MANIFEST_EXIT_CODE
        else:
            print(f"megatronjob.megatronapp.io/{job.metadata.name} is valid{_open_question(job, arguments.profile)}")
    return code


def _open_question(job: MegatronJob, profiles: Sequence[str]) -> str:
    """Return what was not checked of a job that names a profile, of which no file was given."""
    if job.spec.profile is None or profiles:
        return ""
    return f" by itself; rules between fields depend on the profile {job.spec.profile}: check with --profile FILE"
