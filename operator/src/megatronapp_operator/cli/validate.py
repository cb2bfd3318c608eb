"""`megatronapp validate`, which needs no cluster."""

import argparse

from megatronapp_operator.cli.manifest import BAD_MANIFEST_EXIT_CODE, print_problems, read_manifest
from megatronapp_operator.errors import ManifestError, OperatorError


def main(arguments: argparse.Namespace) -> int:
    """Check manifests as the API server does; return the exit code."""
    if arguments.files.count("-") > 1:
        raise OperatorError("standard input can be read only once; write - once")
    code, several = 0, len(arguments.files) > 1
    for file in arguments.files:
        try:
            job = read_manifest(file)
        except ManifestError as error:
            print_problems(error, file=file if several else None)
            code = BAD_MANIFEST_EXIT_CODE
        else:
            print(f"megatronjob.megatronapp.io/{job.metadata.name} is valid")
    return code
