"""Captures that are cut: parts compute what a whole pass does, on autograd's thread, too, and spans lie around one."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

RunRanks = Callable[..., list[Any]]
ELEMENTS = 1 << 20
REPLAYS = 3


def computation() -> Callable[[Any, Any], Any]:
    """Return a computation of an input, and of the function that isolates a part of each of its passes by name."""
    import torch

    class Middle(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, isolate: Any) -> Any:
            ctx.isolate = isolate
            return isolate("forward", lambda: value * 3)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return ctx.isolate("backward", gradient.sin), None

    def compute(given: Any, isolate: Any) -> Any:
        middle: Any = Middle.apply((given * 2).sin(), isolate)  # type: ignore[no-untyped-call] # torch's own gap
        return (middle.cos() * given).sum()

    return compute


def divided_passes() -> dict[str, Any]:
    """Capture both passes of a computation with a cut in each, and replay them on other inputs."""
    import torch

    from megatronapp_trainer.device.graph_stream import graph_stream, on_graph_stream
    from megatronapp_trainer.pipeline.graphs.graph_parts import GraphParts

    compute = computation()

    def plain(given: Any) -> list[Any]:
        loss = compute(given, lambda _name, call: call())
        return [loss, *torch.autograd.grad(loss, [given])]

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    stream, pool = graph_stream(device), torch.cuda.graph_pool_handle()
    parts = {name: GraphParts(stream, pool) for name in ("forward", "backward")}
    threads: dict[str, int] = {}
    order, equal = [], []

    def isolate(name: str, call: Any) -> Any:
        def span(replay: Callable[[], None]) -> None:
            order.append(name)
            replay()
            order.append(f"{name} ended")

        threads[name] = threading.get_ident()
        return parts[name].isolate(call, span)

    with on_graph_stream(device):
        given = torch.randn(ELEMENTS, device=device, requires_grad=True)
        plain(given)
        with parts["forward"].capturing():
            loss = compute(given, isolate)
        with parts["backward"].capturing():
            (gradient,) = torch.autograd.grad(loss, [given])
        for _ in range(REPLAYS):
            fresh = torch.randn(ELEMENTS, device=device, requires_grad=True)
            given.detach().copy_(fresh)
            for each in parts.values():
                each.replay()
            equal += [torch.equal(*pair) for pair in zip([loss, gradient], plain(fresh), strict=True)]
    return {
        "equal": equal,
        "order": order,
        "threads": len(set(threads.values())),
        "parts": [len(each._parts) for each in parts.values()],
    }


def test_parts_compute_what_a_whole_pass_does(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, divided_passes)
    assert found["parts"] == [3, 3]
    assert found["threads"] == 2, "the backward pass is cut on autograd's thread"
    assert found["equal"] == [True] * 2 * REPLAYS
    assert found["order"] == ["forward", "forward ended", "backward", "backward ended"] * REPLAYS


def lone_part() -> tuple[int, list[str], list[float]]:
    """Cut before the first and after the last launch; return the parts, torch's warnings, and the result."""
    import torch

    from megatronapp_trainer.device.graph_stream import graph_stream, on_graph_stream
    from megatronapp_trainer.pipeline.graphs.graph_parts import GraphParts

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    parts = GraphParts(graph_stream(device), torch.cuda.graph_pool_handle())
    with on_graph_stream(device), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = torch.ones(2, device=device)
        with parts.capturing():
            result = parts.isolate(lambda: given * 2, lambda replay: replay())
        given.fill_(4.0)
        parts.replay()
        return len(parts._parts), [str(warning.message) for warning in caught], result.tolist()


def test_parts_without_a_launch_are_dropped(run_ranks: RunRanks) -> None:
    assert [tuple(found) for found in run_ranks(1, lone_part)] == [(1, [], [8.0, 8.0])]
