"""`megatronapp validate`."""

import argparse

from megatronapp_operator.cli.manifest import BAD_MANIFEST_EXIT_CODE, print_problems, read_manifest
from megatronapp_operator.errors import ManifestError


def main(arguments: argparse.Namespace) -> int:
    """Judge manifests as the API server does; returns the exit code."""
    code = 0
    for file in arguments.files:
        try:
            job = read_manifest(file)
        except ManifestError as error:
            print_problems(error, file=file if len(arguments.files) > 1 else "")
            code = BAD_MANIFEST_EXIT_CODE
        else:
            print(f"megatronjob.megatronapp.io/{job.metadata.name} is valid")
    return code
