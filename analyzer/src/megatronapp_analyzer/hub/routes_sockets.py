"""WebSockets: agents that bring traces, and pages that listen."""

from fastapi import APIRouter, WebSocket

from megatronapp_analyzer.hub import live, session
from megatronapp_analyzer.hub.access import AGENT_PATH, HubOf

router = APIRouter()


@router.websocket(AGENT_PATH)
async def agent(socket: WebSocket, hub: HubOf) -> None:
    """One agent, as long as it is connected."""
    await socket.accept()
    await session.serve(socket, hub)


@router.websocket("/api/v1/live")
async def page(socket: WebSocket, hub: HubOf) -> None:
    """One page, as long as it listens."""
    await socket.accept()
    await live.serve(socket, hub)
