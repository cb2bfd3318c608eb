"""Work of an engine besides choosing tokens: joining, stopping, cancelling, reporting of prompts, failing."""

import contextlib
import pathlib
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generating_ranks import (
    LAYOUTS,
    VARIANTS,
    VOCABULARY,
    config_of,
    drain,
    finish_of,
    generated,
    groups_of,
    model_of,
    open_engine,
    plain_of,
    prompt_events,
    prompts,
)

from megatronapp_trainer.errors import CheckpointError, UsageError
from megatronapp_trainer.inference.build import generation_layout, load_weights
from megatronapp_trainer.inference.engine import Engine
from megatronapp_trainer.inference.errors import CacheTooLargeError, EngineLostError, QueueFullError, RequestError
from megatronapp_trainer.inference.events import Event, FinishedEvent, PromptEvent, TokenEvent
from megatronapp_trainer.inference.model_runner import RunnerOptions
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.inference.worker_group import WorkerGroup

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
PROMPTS = prompts((5, 12, 3, 40))


def greedy(name: str, prompt: tuple[int, ...], count: int = 12, **fields: Any) -> GenerationRequest:
    return GenerationRequest(id=name, prompt=prompt, max_new_tokens=count, temperature=0, **fields)


def decode(tokens: Any) -> str:
    """A text for tokens: each is a number in angle brackets."""
    return "".join(f"<{token}>" for token in tokens)


def alone(check: str, variant: str = "rotary-grouped", is_ahead: bool = False) -> Any:
    """Run one of the checks below against an engine of one process, whose steps may be launched ahead."""
    with groups_of("") as (layout, device):
        config = config_of(VARIANTS[variant])
        model = model_of(config, layout, device)
        plain = plain_of(model, config)
        gang, _ = open_engine(model, config, layout, device, async_scheduling=is_ahead)
        return globals()[check](gang, Engine(gang, decode=decode, end_tokens={0}, most_waiting=3), plain)


def run(engine: Engine, *requests: GenerationRequest) -> list[Event]:
    for request in requests:
        engine.submit(request)
    return drain(engine)


def joins(_gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    """Check that a request that is received while another generates, and is read in between, changes nothing for
    either."""
    apart = [generated(run(engine, greedy(name, PROMPTS[place])), name) for name, place in (("a", 0), ("d", 3))]
    engine.submit(greedy("a", PROMPTS[0]))
    events = engine.step() + engine.step()
    assert len(generated(events, "a")) == 2
    engine.submit(greedy("d", PROMPTS[3]))
    kinds = []
    while engine.is_busy:
        step = engine.step()
        kinds.append({record.request_id for record in step})
        events += step
    assert [generated(events, name) for name in "ad"] == apart
    assert {"a"} in kinds[:4]  # the one generates while the other's prompt of three chunks is read
    assert any(kind == {"a", "d"} for kind in kinds)


def mixes(gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    """Check requests at random times, many more than slots, some of them cancelled: each as if it were alone."""
    source = random.Random(3)
    requests = [
        GenerationRequest(
            id=str(index),
            prompt=prompts((source.randint(1, 40),))[0],
            max_new_tokens=source.randint(1, 15),
            temperature=source.choice((0.0, 1.0)),
            top_p=source.choice((0.6, 1.0)),
            seed=index,
        )
        for index in range(14)
    ]
    apart = {request.id: generated(run(engine, request), request.id) for request in requests}
    late, events = Engine(gang, end_tokens={0}, most_waiting=20), []
    for request in requests:
        late.submit(request)
        if source.random() < 0.2:
            late.cancel(request.id)
        for _ in range(source.randint(0, 3)):
            events += late.step()
    events += drain(late)
    for request in requests:
        tokens = generated(events, request.id)
        assert tokens == apart[request.id][: len(tokens)]
        assert (finish_of(events, request.id).reason == "cancelled") == (tokens != apart[request.id])


def stops(_gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    tokens = generated(run(engine, greedy("whole", PROMPTS[1])), "whole")
    pair = tuple(tokens[3:5])
    ended = run(engine, greedy("pair", PROMPTS[1], stop_tokens=((VOCABULARY - 1,) * 3, pair)))
    assert finish_of(ended, "pair").matched == pair
    assert finish_of(ended, "pair").reason == "stop"
    first = next(place for place in range(1, len(tokens)) if tuple(tokens[place - 1 : place + 1]) == pair)
    assert generated(ended, "pair") == tokens[: first + 1]
    text = f"{tokens[3]}><{tokens[4]}"
    ended = run(engine, greedy("text", PROMPTS[1], stop_texts=(text,)))
    assert finish_of(ended, "text").matched == text
    whole = decode(tokens)
    streamed = "".join(event.text or "" for event in ended if isinstance(event, TokenEvent | FinishedEvent))
    assert streamed == whole[: whole.index(text)]


def ends_of_documents(gang: WorkerGroup, _engine: Engine, _plain: Any) -> None:
    """Check with the end of a document as the second token of this prompt's answer."""
    tokens = generated(run(Engine(gang), greedy("whole", PROMPTS[2])), "whole")
    engine = Engine(gang, decode=decode, end_tokens={tokens[1]})
    ended = run(engine, greedy("end", PROMPTS[2]), greedy("on", PROMPTS[2], ignore_end=True))
    first = tokens.index(tokens[1])
    assert generated(ended, "end") == tokens[: first + 1]
    assert finish_of(ended, "end").matched == tokens[1]
    assert [event.text for event in ended if isinstance(event, TokenEvent) and event.request_id == "end"][-1] == ""
    assert generated(ended, "on") == tokens
    assert finish_of(ended, "on").reason == "length"
    engine = Engine(gang, decode=decode, decode_plain=lambda ids: decode(token for token in ids if token != tokens[1]))
    ended = run(engine, greedy("whole", PROMPTS[2]), greedy("plain", PROMPTS[2], skip_special=True))
    texts = {
        name: "".join(event.text or "" for event in ended if isinstance(event, TokenEvent) and event.request_id == name)
        for name in ("whole", "plain")
    }
    assert texts == {"whole": decode(tokens), "plain": decode(token for token in tokens if token != tokens[1])}


def cancels(_gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    whole = generated(run(engine, greedy("b", PROMPTS[1])), "b")
    for name, place in (("a", 0), ("b", 1), ("c", 2)):
        engine.submit(greedy(name, PROMPTS[place]))
    events = engine.step() + engine.step() + engine.step()
    engine.submit(greedy("late", PROMPTS[0]))
    assert engine.cancel("a")
    assert engine.cancel("late")
    assert not engine.cancel("unknown")
    events += drain(engine)
    assert finish_of(events, "a").reason == "cancelled"
    assert finish_of(events, "a").generated_tokens == len(generated(events, "a")) < 12
    assert finish_of(events, "late") == FinishedEvent(
        request_id="late", reason="cancelled", prompt_tokens=5, generated_tokens=0
    )
    assert generated(events, "b") == whole
    assert not engine.cancel("a")


def reports_prompts(_gang: WorkerGroup, engine: Engine, plain: Any) -> None:
    """Log-probabilities, candidates and logits of every position, in three chunks, equal plain torch's."""
    request = greedy("all", PROMPTS[3], 4, prompt_logprobs=True, logits=True, candidates=5)
    events = run(engine, request, greedy("none", PROMPTS[0], 4))
    assert prompt_events(events, "none") == []
    prompt = prompt_events(events, "all")
    made = [event for event in events if isinstance(event, TokenEvent) and event.request_id == "all"]
    tokens = [*request.prompt, *(event.token for event in made)]
    logits = plain.logits(tokens)
    assert [event.index for event in prompt] == list(range(40))
    assert [event.target for event in prompt] == [*request.prompt[1:], None]
    every: list[PromptEvent | TokenEvent] = [*prompt[:-1], *made]
    for place, event in enumerate(every):
        assert event.logits is not None
        torch.testing.assert_close(event.logits, logits[place], atol=1e-4, rtol=1e-4)
        logprobs = logits[place].log_softmax(0)
        assert event.logprob == pytest.approx(float(logprobs[tokens[place + 1]]), abs=1e-4)
        best = logprobs.topk(5)
        assert [candidate.logprob for candidate in event.candidates] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert prompt[-1].logits is not None
    assert made[0].logits is not None
    assert torch.equal(prompt[-1].logits, made[0].logits)


def reads_only(_gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    """No new tokens: the prompt is scored."""
    events = run(engine, greedy("score", PROMPTS[0], 0, prompt_logprobs=True))
    assert len(prompt_events(events, "score")) == 5
    assert generated(events, "score") == []
    assert finish_of(events, "score").reason == "length"


def waits_in_line(_gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    for index in range(3):
        engine.submit(greedy(str(index), PROMPTS[0]))
    engine.step()
    for index in range(3, 6):
        engine.submit(greedy(str(index), PROMPTS[0]))
    assert [engine.queue_position(str(index)) for index in range(6)] == [None, None, None, 0, 1, 2]
    with pytest.raises(QueueFullError, match="3 requests wait"):
        engine.submit(greedy("more", PROMPTS[0]))
    with pytest.raises(RequestError, match="open already"):
        engine.submit(greedy("0", PROMPTS[0]))
    events = drain(engine)
    order = [event.request_id for event in events if isinstance(event, FinishedEvent)]
    assert order == sorted(order)


def wakes(_gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    """Wait for work until another thread submits some."""
    assert not engine.wait_for_work(timeout_s=0)
    other = threading.Thread(target=engine.submit, args=(greedy("a", PROMPTS[0], 1),))
    other.start()
    assert engine.wait_for_work(timeout_s=60)
    other.join()
    drain(engine)


def refuses(gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    for field, request in (
        ("max_new_tokens", greedy("a", PROMPTS[3], 25)),
        ("prompt", greedy("a", (1, VOCABULARY))),
        ("prompt", greedy("a", (-1, 1))),
    ):
        with pytest.raises(RequestError) as caught:
            engine.submit(request)
        assert caught.value.field == field
    with pytest.raises(RequestError, match="no tokenizer"):
        Engine(gang).submit(greedy("a", (1,), stop_texts=("x",)))
    assert not engine.is_busy


def shows_hooks(gang: WorkerGroup, engine: Engine, _plain: Any) -> None:
    """Queries and keys before and after rotation, values, and what attention is given: at prefill and at decode."""
    seen: dict[str, list[Any]] = {"attention": [], "core": [], "rotation": []}
    attention = gang.runner.model.decoder.layers[1].self_attention
    attention.register_forward_pre_hook(lambda _m, inputs: seen["attention"].append(inputs[0].shape))
    attention.core_attention.register_forward_pre_hook(lambda _m, inputs: seen["core"].append(inputs[:3]))
    attention.core_attention.rotation.register_forward_hook(
        lambda _m, inputs, outputs: seen["rotation"].append((inputs, outputs))
    )
    run(engine, greedy("a", PROMPTS[0], 2), greedy("b", PROMPTS[2], 2))
    assert seen["attention"] == [(8, 1, 64), (2, 1, 64)]
    for tokens, (query, key, value) in zip((8, 2), seen["core"], strict=True):
        assert query.shape == (tokens, 1, 4, 16)
        assert key.shape == value.shape == (tokens, 1, 2, 16)
    for (_, key), (_, turned) in seen["rotation"]:
        assert key.norm().item() == pytest.approx(turned.norm().item(), rel=1e-5)
        assert not torch.equal(key, turned)
    assert gang.runner.plan is not None
    assert [segment.start for segment in gang.runner.plan.segments] == [5, 3]


CHECKS = (
    joins,
    mixes,
    stops,
    ends_of_documents,
    cancels,
    reports_prompts,
    reads_only,
    waits_in_line,
    wakes,
    refuses,
    shows_hooks,
)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_engine(run_ranks: RunRanks, check: str, *, is_ahead: bool) -> None:
    run_ranks(1, alone, check, "rotary-grouped", is_ahead)


def too_large(capacity: int) -> str:
    with groups_of("") as (layout, device):
        config = config_of(VARIANTS["rotary-grouped"])
        model = model_of(config, layout, device)
        with pytest.raises(CacheTooLargeError) as caught:
            open_engine(model, config, layout, device, slots=1000, capacity=capacity)
    return str(caught.value)


def test_a_cache_that_does_not_fit_is_not_allocated(run_ranks: RunRanks) -> None:
    (text,) = run_ranks(1, too_large, 10**8)
    assert "what fits: " in text
    assert "slots of 100000000 tokens needs" in text


class DisconnectedError(Exception):
    """A rank that dies."""


def with_a_dead_rank(flags: str, dead: int) -> Any:
    """End one rank in the middle of a step; return what rank 0 then reports."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {VARIANTS['learned-tied']}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device, slots=2, prefill_chunk=32)
        steps = 0

        def count(_module: Any, _inputs: Any) -> None:
            nonlocal steps
            steps += 1
            if layout.rank == dead and steps == 5:
                raise DisconnectedError

        gang.runner.model.decoder.register_forward_pre_hook(count)
        if engine is None:
            with contextlib.suppress(DisconnectedError, EngineLostError):
                gang.follow()
            return None  # the process ends, and with it its connections
        for index in range(3):
            engine.submit(greedy(str(index), PROMPTS[index]))
        events = drain(engine)
        assert isinstance(engine.failure, EngineLostError)
        with pytest.raises(EngineLostError):
            engine.step()
        with pytest.raises(EngineLostError):
            engine.submit(greedy("more", PROMPTS[0]))
        ends = [finish_of(events, str(index)) for index in range(3)]
        return [(end.reason, type(end.error).__name__, str(end.error), end.generated_tokens) for end in ends]


@pytest.mark.parametrize(
    ("layout", "dead", "read"), [pytest.param("TP2", 1, 3, id="TP2"), pytest.param("PP2", 1, 4, id="PP2-last-stage")]
)
def test_a_dead_rank_ends_what_is_open(run_ranks: RunRanks, layout: str, dead: int, read: int) -> None:
    """A rank dies in the fifth step, before whose launch the tokens of the fourth are read with two stages alone."""
    world, flags = LAYOUTS[layout]
    ends = run_ranks(world, with_a_dead_rank, flags, dead)[0]
    assert [(reason, kind) for reason, kind, _, _ in ends] == [("error", "EngineLostError")] * 3
    assert all("a rank of the gang was lost" in text for _, _, text, _ in ends)
    assert [count for _, _, _, count in ends] == [read, read, 0]


def with_a_dead_first_rank(flags: str) -> str | None:
    """Return the error of the other rank when rank 0 is lost between two steps."""
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {VARIANTS['learned-tied']}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
        if engine is not None:
            run(engine, greedy("a", PROMPTS[0], 2))
            return None
        with pytest.raises(EngineLostError) as caught:
            gang.follow()
        return str(caught.value)


def test_followers_learn_that_the_first_rank_is_dead(run_ranks: RunRanks) -> None:
    _, message = run_ranks(2, with_a_dead_first_rank, LAYOUTS["PP2"][1])
    assert message.startswith("a rank of the gang was lost")


def commands(flags: str) -> list[Any]:
    """Return the commands that each rank received between steps."""
    received: list[Any] = []
    with groups_of(flags) as (layout, device):
        config = config_of(f"{flags} {VARIANTS['learned-tied']}")
        gang, engine = open_engine(model_of(config, layout, device), config, layout, device)
        gang.handle("note", lambda payload: received.append((payload, gang.runner.plan is None)))
        if engine is None:
            gang.follow()
            return received
        engine.command("note", {"large": "x" * 20000})
        engine.submit(greedy("a", PROMPTS[0], 2))
        engine.step()
        engine.command("note", 2)
        engine.command("forget_graphs")
        drain(engine)
        engine.close()
        return received


def test_commands_reach_all_ranks_at_step_boundaries(run_ranks: RunRanks) -> None:
    """Send a command that is larger than a message has space for at first."""
    ranks = run_ranks(2, commands, LAYOUTS["TP2"][1])
    assert ranks == [[({"large": "x" * 20000}, True), (2, False)]] * 2


def test_a_missing_checkpoint_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint \(iter_0000001: it has no megatronapp"):
        load_weights(None, config_of(""), tmp_path)


def test_a_generating_gang_is_a_single_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"4 ranks are 2 replicas .*: start 2$"):
        generation_layout(config_of(LAYOUTS["TP2"][1]))


def test_options_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="slots is 0"):
        RunnerOptions(slots=0)
