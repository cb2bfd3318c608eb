"""`megatronapp serve` on this machine."""

import argparse
import sys
from typing import Any

from megatronapp_common.errors import JobError
from megatronapp_common.job import manifest_text
from megatronapp_common.job.profiles.effective import LayeredJob, load_layered_job
from megatronapp_common.names import API_VERSION, KIND
from megatronapp_operator.backends.process.state import registry
from megatronapp_operator.cli.addresses import api_access
from megatronapp_operator.cli.run import runnable, start
from megatronapp_operator.errors import ManifestError

RESTART_S = 1
"""Seconds before the first restart: users wait, and one gang overloads nothing."""


def main(arguments: argparse.Namespace) -> int:
    """Serve a checkpoint, or print where one is served; return the exit code."""
    if arguments.job is not None:
        return _print_access(arguments.job)
    if arguments.manifest:
        sys.stdout.write(manifest_text(manifest_of(arguments)))
        return 0
    return start(lambda: serve_job(arguments), arguments)


def serve_job(arguments: argparse.Namespace) -> LayeredJob:
    """Return the job of a command line. Raises ManifestError, one problem a line."""
    try:
        layered = load_layered_job(manifest_of(arguments), ())
        runnable(layered.job)
        return layered
    except JobError as error:
        raise ManifestError(str(error)) from error


def manifest_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the manifest of a command line, with only the options that were given."""
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    data = {"tokenizer": arguments.tokenizer_file, "vocabFile": arguments.vocab_file, "mergeFile": arguments.merge_file}
    serve = {
        "host": arguments.host,
        "port": arguments.port,
        "maxBatch": arguments.max_batch_size,
        "maxTokens": arguments.max_tokens,
        "maxLength": arguments.max_length,
        "queueLength": arguments.queue_length,
        "prefillChunk": arguments.prefill_chunk,
        "precision": arguments.precision,
    }
    spec: dict[str, Any] = {
        "mode": "serve",
        "procPerNode": tensor * pipeline,
        "gpusPerNode": tensor * pipeline if arguments.gpu else 0,
        "parallelism": {"tensor": tensor, "pipeline": pipeline, "data": 1},
        "checkpoint": {"load": arguments.load},
        "data": _given(data),
        "serve": _given(serve),
        "scope": _given({"plugins": arguments.scope_plugins}),
        "args": [*arguments.passed, *arguments.args],
        "analyzer": {"enabled": arguments.pages},
        "runPolicy": {"backoff": {"initialSeconds": RESTART_S}},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": arguments.name},
        "spec": {name: value for name, value in spec.items() if value not in ({}, [])},
    }


def _given(block: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if value is not None}


def _print_access(name: str) -> int:
    """Print two lines for a shell; clients of OpenAI's interface read these variables."""
    url, key = api_access(registry.view(name).paths)
    print(f"export OPENAI_BASE_URL={url}/v1\nexport OPENAI_API_KEY={key}", flush=True)
    return 0
