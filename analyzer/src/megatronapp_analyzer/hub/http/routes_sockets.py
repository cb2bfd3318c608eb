"""WebSockets: agents that bring traces, and pages that listen."""

from fastapi import APIRouter, WebSocket

from megatronapp_analyzer.hub.http import broadcast
from megatronapp_analyzer.hub.http.access import AGENT_PATH, HubOf
from megatronapp_analyzer.hub.ingest import agent_connection

router = APIRouter()


@router.websocket(AGENT_PATH)
async def agent(socket: WebSocket, hub: HubOf) -> None:
    """One agent, as long as it is connected."""
    await socket.accept()
    await agent_connection.serve(socket, hub)


@router.websocket("/api/v1/live")
async def page(socket: WebSocket, hub: HubOf) -> None:
    """One page, as long as it listens."""
    await socket.accept()
    await broadcast.serve(socket, hub)
