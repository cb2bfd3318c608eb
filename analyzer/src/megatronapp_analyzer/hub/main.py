"""Command line of the hub: serves one job."""

import argparse
import logging
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from megatronapp_analyzer.errors import AnalyzerError, SettingsError
from megatronapp_analyzer.hub.http.app import create_app
from megatronapp_analyzer.hub.http.server import build_server
from megatronapp_analyzer.hub.http.sockets import open_sockets
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.judge.links import ProcessJudge
from megatronapp_analyzer.hub.neighbours import UserJobs
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, check_bind, load_ended, load_job_file
from megatronapp_analyzer.process import die_with_parent, thread_count
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_common.names import Env, ExitCode
from megatronapp_common.web.tokens import TokenRole, derive_token, read_secret

LOG = logging.getLogger("megatronapp_analyzer.hub")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the hub's flags; the other settings are read from the environment (names.Env)."""
    parser = argparse.ArgumentParser(prog="python -m megatronapp_analyzer.hub", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 takes a free one")
    parser.add_argument("--job-file", type=pathlib.Path, required=True, help="the MegatronJob, YAML or JSON")
    parser.add_argument("--state-dir", type=pathlib.Path, required=True, help="where traces and verdicts are kept")
    parser.add_argument("--frontend", type=pathlib.Path, help="folder of the built page; none is served if absent")
    parser.add_argument("--allow-remote", action="store_true", help="listen on an address that other machines reach")
    parser.add_argument(
        "--hold-steps",
        type=int,
        default=StoreLimits().full_steps,
        help="newest steps kept with all their spans, memory permitting (default: %(default)s)",
    )
    parser.add_argument(
        "--judge-threads",
        type=thread_count,
        metavar="N",
        help="threads that judge a large step (default: the processors of the hub, at most 4)",
    )
    parser.add_argument("--status-file", type=pathlib.Path, help="status of an ended job: only show what is stored")
    parser.add_argument("--jobs-dir", type=pathlib.Path, help="folder with the state of other jobs, for the list")
    parser.add_argument("--serve-url", metavar="URL", help="http://host:port of rank 0, where a model is served")
    parser.add_argument("--die-with-parent", action=argparse.BooleanOptionalAction, default=True)
    return parser


def load_secret(environment: Mapping[str, str]) -> str:
    """Return the job's secret. Raises SettingsError if it is not named or does not exist."""
    path = environment.get(Env.SECRET_FILE)
    if not path:
        raise SettingsError(f"{Env.SECRET_FILE.value} is not set; name the file with the job's secret in it")
    try:
        return read_secret(pathlib.Path(path))
    except OSError as error:
        raise SettingsError(f"{Env.SECRET_FILE.value}={path}: {error}") from error


def make_state_dir(path: pathlib.Path) -> None:
    """Create the folder for traces and verdicts. Raises SettingsError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--state-dir {path}: {error.strerror}; name a folder that can be written") from error


def serve(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ExitCode:
    """Serve until a signal is received or a task of the hub fails; the exit code says which."""
    check_bind(arguments.host, allow_remote=arguments.allow_remote)
    secret = load_secret(environment)
    make_state_dir(arguments.state_dir)
    job = load_job_file(arguments.job_file, name=environment.get(Env.JOB), uid=environment.get(Env.JOB_UID))
    store = StoreLimits(full_steps=arguments.hold_steps)
    model = Rank0Client(arguments.serve_url, derive_token(secret, TokenRole.SERVE)) if arguments.serve_url else None
    settings = HubSettings(
        job=job,
        state_dir=arguments.state_dir,
        store=store,
        serve=model,
        ended=load_ended(arguments.status_file) if arguments.status_file else None,
        neighbours=UserJobs(arguments.jobs_dir) if arguments.jobs_dir else None,
    )
    hub = Hub(settings, ProcessJudge(threads=arguments.judge_threads))
    with open_sockets(arguments.host, arguments.port) as found:
        app = create_app(hub, secret=secret, frontend=arguments.frontend, named=found.named)
        LOG.info("listening on %s%s", found.url, "" if found.named else " (its pages get no name of their own)")
        server = build_server(app)
        hub.on_failure = lambda: setattr(server, "should_exit", True)
        server.run(sockets=list(found.sockets))
    return ExitCode.OWN_FAILURE if hub.failed else ExitCode.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hub; returns the exit code."""
    parent = os.getppid()
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s hub %(levelname)s %(message)s")
    try:
        if arguments.die_with_parent:
            die_with_parent(parent)
        return int(serve(arguments, os.environ))
    except AnalyzerError as error:
        print(f"hub: {error}", file=sys.stderr)
        return int(ExitCode.USAGE)
