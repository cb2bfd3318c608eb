"""The subcommands on a cluster: the same words as on this machine, said to an API server."""

import argparse
import os

CONTEXT_VARIABLE = "MEGATRONAPP_CONTEXT"
"""Environment variable that names a context of the kubeconfig, so that every subcommand means that cluster."""


def meant(arguments: argparse.Namespace) -> bool:
    """Whether the command line means a cluster, and not this machine."""
    named = any(getattr(arguments, name, None) for name in ("context", "namespace", "kubeconfig", "cluster"))
    return named or bool(os.environ.get(CONTEXT_VARIABLE))
