"""Agents that a hub takes, by their first frame."""

import pathlib

import pytest

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.hub.http import agent_socket
from megatronapp_common import frames

HELLO = (pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "wire" / "hello.bin").read_bytes()


def test_a_hub_takes_agents_of_the_minor_release_before(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = frames.decode(HELLO)
    assert agent_socket.parse_hello(hello, "demo", "a-1").worker == 1
    monkeypatch.setattr(agent_socket, "PROTOCOL", 2)
    assert agent_socket.parse_hello(hello, "demo", "a-1").worker == 1
    monkeypatch.setattr(agent_socket, "PROTOCOL", 3)
    with pytest.raises(ProtocolError, match="protocol 1 is not 3"):
        agent_socket.parse_hello(hello, "demo", "a-1")
