"""The hub of a job on a cluster, where its pod would be: it plays a recorded session, or has a model that generates.

It is the real hub with the real guard, in a thread of the test's process, so that a test can hand it what ranks send.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Iterator

import gateway
import scope_rank_zero
import scope_session

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.http.app import create_app
from megatronapp_analyzer.hub.http.server import build_server
from megatronapp_analyzer.hub.http.sockets import open_sockets
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.session_player import SessionPlayer, settings_of
from megatronapp_common.frames import Frame
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret

DEADLINE_S = 120


@dataclasses.dataclass
class ScopeHub:
    """A hub that runs. `take` brings it a frame of a rank."""

    hub: Hub
    loop: asyncio.AbstractEventLoop
    rank_zero: scope_rank_zero.RankZero | None = None

    def take(self, rank: int, frame: Frame) -> None:
        """Take a frame as an agent would."""
        self.loop.call_soon_threadsafe(self.hub.scope.core.ingest.take_frame, 0, rank, frame)


def identity_of(job: gateway.GatewayJob) -> JobIdentity:
    return JobIdentity(name=job.name, uid=job.uid, traced=False)


@contextlib.contextmanager
def replaying(job: gateway.GatewayJob, file: pathlib.Path, *, port: int, key: str) -> Iterator[ScopeHub]:
    """A hub that has played a recorded session to its end."""
    session = session_file.load(file)
    hub = Hub(HubSettings(job=identity_of(job), state_dir=None), LocalJudge(Detector))
    hub.scope = ScopeService(settings_of(session))
    for _ in SessionPlayer(session, hub.scope.core).steps():
        pass
    with serving(hub, job, port=port, key=key) as running:
        yield running


@contextlib.contextmanager
def generating(
    job: gateway.GatewayJob, recording: scope_session.Recording, *, port: int, key: str
) -> Iterator[ScopeHub]:
    """Start a hub with a model that generates the recorded run for any request."""
    token = derive_token(job_secret(key, job.uid), TokenRole.SERVE)
    with scope_rank_zero.serve(scope_rank_zero.RankZero(recording, token)) as rank:
        client = Rank0Client(rank.url, token)
        hub = Hub(HubSettings(job=identity_of(job), state_dir=None, serve=client), LocalJudge(Detector))
        with serving(hub, job, port=port, key=key) as running:
            running.rank_zero = rank
            rank.publish = lambda frame: running.take(0, frame)
            running.take(0, scope_session.publisher(recording.shape, 0, 1, 1))
            yield running


def generate(running: ScopeHub, recording: scope_session.Recording) -> None:
    """Send what the ranks send of the run, from its begin to its end."""
    for rank, frame in scope_session.rank_frames(recording):
        running.take(rank, frame)


@contextlib.contextmanager
def serving(hub: Hub, job: gateway.GatewayJob, *, port: int, key: str) -> Iterator[ScopeHub]:
    """`hub` at the address of the job's hub."""
    loop = asyncio.new_event_loop()
    hub.scope.core.ingest.assembler.wait_s = DEADLINE_S  # frames that are late are tested elsewhere
    with open_sockets(job.address, port) as found:
        server = build_server(create_app(hub, secret=job_secret(key, job.uid), frontend=None))
        work = server.serve(sockets=list(found.sockets))
        thread = threading.Thread(target=lambda: loop.run_until_complete(work), daemon=True)
        thread.start()
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (hub.ready and hub.analysis.caught_up):  # until then its summary answers 503
                assert thread.is_alive() and time.monotonic() < deadline
                time.sleep(0.005)
            yield ScopeHub(hub, loop)
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            loop.close()
