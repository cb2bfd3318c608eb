"""`megatronapp scope replay`: pages and interface of a recorded session, without a model."""

import asyncio
import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import AsyncIterator

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.http.app import create_app
from megatronapp_analyzer.hub.http.server import build_server
from megatronapp_analyzer.hub.http.sockets import open_sockets
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.service import ScopeService
from megatronapp_analyzer.scope.session_player import SessionPlayer, settings_of
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

HOST = "127.0.0.1"
FRONTEND_ENV = "MEGATRONAPP_FRONTEND"
CHECKOUT = pathlib.Path(__file__).resolve().parents[4]


def frontend() -> pathlib.Path | None:
    """Return the folder of the built page, if it has been built."""
    folder = pathlib.Path(os.environ.get(FRONTEND_ENV) or CHECKOUT / "frontend" / "dist")
    return folder if (folder / "index.html").exists() else None


def replay(file: pathlib.Path, *, speed: str, port: int) -> int:
    """Serve until a signal is received. Raises SessionError for a file of which nothing can be read."""
    session = session_file.load(file)
    if session.broken:
        print(f"warning: {file}: {session.broken}", file=sys.stderr)
    settings = settings_of(session)
    identity = JobIdentity(name=settings.job, uid=f"replay-{os.getpid()}", traced=False)
    hub = Hub(HubSettings(job=identity, state_dir=None), LocalJudge(Detector))
    hub.scope = ScopeService(settings)
    player = SessionPlayer(session, hub.scope.core)
    secret = new_secret()
    print(f"token for later: {derive_token(secret, TokenRole.CONTROLLER)}")
    asyncio.run(_serve(hub, player, secret, speed=speed, port=port))
    return 0


async def _serve(hub: Hub, player: SessionPlayer, secret: str, *, speed: str, port: int) -> None:
    with open_sockets(HOST, port) as found:
        app = create_app(hub, secret=secret, frontend=frontend(), named=found.named)
        playing = asyncio.create_task(_play(player, hub, speed))
        code = app.state.logins.codes.make(TokenRole.CONTROLLER)
        print(f"{found.url}/#code={code}  (good once, within a minute)", flush=True)
        try:
            await build_server(app).serve(sockets=list(found.sockets))
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


async def _play(player: SessionPlayer, hub: Hub, speed: str) -> None:
    """Play the prefill at once, and the steps after it once a page is connected."""
    steps = player.steps()
    next(steps, None)
    if speed == "all":
        for _ in steps:
            pass
        return
    await hub.scope.core.feed.watched.wait()
    async for _ in _step_times(player, speed):
        if next(steps, None) is None:
            return


async def _step_times(player: SessionPlayer, speed: str) -> AsyncIterator[None]:
    """Yield when the next step is to be played."""
    if speed != "step":
        while True:
            await asyncio.sleep(1 / (player.rate * float(speed)))
            yield
    typed: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def listen() -> None:
        for line in sys.stdin:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(typed.put_nowait, line)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        await typed.get()
        yield
