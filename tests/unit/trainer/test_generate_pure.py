"""The parts of generation that need no model: requests, plans, sampling, text, and the size of the cache."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.scope.perturbation.recipe import Recipe
from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.inference import patch_sources
from megatronapp_trainer.inference.detokenizer import TextStream
from megatronapp_trainer.inference.errors import CacheTooLargeError, QueueFullError, RequestError
from megatronapp_trainer.inference.model.kv_cache import KvCacheShape, check_memory
from megatronapp_trainer.inference.model.sampling import (
    OutputLauncher,
    _sampling_mask,
    choose,
    gumbel_noise,
    noise_keys,
)
from megatronapp_trainer.inference.model.token_statistics import StatisticsLauncher
from megatronapp_trainer.inference.patch_sources import PatchSource, SourceCache
from megatronapp_trainer.inference.perturbed_steps import RecipeRotation
from megatronapp_trainer.inference.rank_channel import _packed, _unpacked
from megatronapp_trainer.inference.request import ComparedBranch, GenerationRequest
from megatronapp_trainer.inference.scheduler import MOST_AHEAD, Scheduler
from megatronapp_trainer.inference.step_plan import OutputRequest, SamplingParams


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"id": ""}, "id"),
        ({"prompt": ()}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt": (1, True)}, "prompt"),
        ({"prompt": (1.0,)}, "prompt"),
        ({"stop_tokens": ([1],)}, "stop_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"candidates": 101}, "candidates"),
        ({"stop_tokens": ((),)}, "stop_tokens"),
        ({"stop_texts": ("",)}, "stop_texts"),
        ({"stop_texts": ("x",) * 17}, "stop_texts"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: ") as caught:
        GenerationRequest(**({"id": "a", "prompt": (1,)} | fields))
    assert caught.value.field == field


def drawn(logits: list[float], draws: int, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    """Return how often each token is drawn, as fractions."""
    keys = torch.tensor([noise_keys(7, position) for position in range(draws)])
    tokens = choose(
        torch.tensor(logits).expand(draws, -1),
        torch.full((draws,), temperature),
        torch.full((draws,), top_k),
        torch.full((draws,), top_p),
        keys,
        filters=bool(top_k) or top_p < 1,
    )
    return torch.bincount(tokens, minlength=len(logits)) / draws


LOGITS = [1.0, 0.0, 2.0, -1.0, 0.5]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """Fixed seeds. Four deviations of a share over 20,000 draws are below 0.015."""
    frequencies = drawn(LOGITS, 20_000, temperature=temperature)
    torch.testing.assert_close(frequencies, (torch.tensor(LOGITS) / temperature).softmax(0), atol=0.015, rtol=0)


def test_filters_keep_the_likeliest() -> None:
    """Probabilities: 0.56, 0.20, 0.12, 0.08, 0.03 for tokens 2, 0, 4, 1, 3."""
    assert (drawn(LOGITS, 2000, top_k=2) > 0).tolist() == [True, False, True, False, False]
    assert (drawn(LOGITS, 2000, top_p=0.8) > 0).tolist() == [True, False, True, False, True]
    assert (drawn(LOGITS, 2000, top_p=0.5) > 0).tolist() == [False, False, True, False, False]
    assert (drawn(LOGITS, 2000, top_k=3, top_p=0.99) > 0).tolist() == [True, False, True, False, True]
    assert drawn(LOGITS, 10, temperature=0)[2] == 1
    expected = torch.tensor([2.0, 1.0]).softmax(0)
    assert drawn(LOGITS, 20_000, top_k=2)[2].item() == pytest.approx(expected[0].item(), abs=0.015)


def test_a_filtering_neighbour_removes_no_token() -> None:
    """Sums of floats reach 1 early where there are many tokens."""
    logits = torch.cat((torch.tensor([30.0]), torch.linspace(0, -30, 5000)))
    ordered, free, bound = logits.expand(2, -1), torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, 0.9])
    assert _sampling_mask(ordered, free, bound).sum(1).tolist() == [5001, 1]


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    keys = torch.tensor([noise_keys(1, 5), noise_keys(2, 5), noise_keys(1, 6)])
    noise = gumbel_noise(keys, 1000)
    assert torch.equal(gumbel_noise(keys[:1], 1000)[0], noise[0])
    assert torch.equal(gumbel_noise(keys, 10), noise[:, :10])
    assert all((noise[a] == noise[b]).float().mean() < 0.01 for a, b in ((0, 1), (0, 2), (1, 2)))
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.08)


def test_readings_of_mixed_outputs() -> None:
    logits = torch.tensor([LOGITS, LOGITS, LOGITS])
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, noise=noise_keys(7, 0))
    outputs = (
        OutputRequest(row=0, candidates=3),
        OutputRequest(row=1, target=3, logits=True),
        OutputRequest(row=2, sampling=sampling, candidates=1),
    )
    greedy, target, sampled = OutputLauncher(rows=3).launch(logits, outputs).read(IdleWindow())
    logprobs = torch.tensor(LOGITS).log_softmax(0).tolist()
    assert greedy.token == 2
    assert greedy.logprob == pytest.approx(logprobs[2])
    assert [candidate.token for candidate in greedy.candidates] == [2, 0, 4]
    assert target.token == 3
    assert target.logprob == pytest.approx(logprobs[3])
    assert target.candidates == ()
    assert target.logits is not None
    assert target.logits.tolist() == LOGITS
    assert sampled.token == int(drawn(LOGITS, 1).argmax())
    assert [candidate.token for candidate in sampled.candidates] == [2]


def test_measures_of_more_rows_than_there_is_memory_for() -> None:
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(3))
    whole = StatisticsLauncher(rows=8).launch(logits, [3, 0, 3, 2, 3])
    parts = StatisticsLauncher(rows=2).launch(logits, [3, 0, 3, 2, 3])
    assert [row for row in range(5) if whole[row] is None] == [row for row in range(5) if parts[row] is None] == [1]
    for row, (row_alone, other) in enumerate(zip(whole, parts, strict=True)):
        if row_alone is not None and other is not None:
            assert other.get().logprobs.tolist() == row_alone.get().logprobs.tolist()
            assert other.get().tokens.tolist() == logits[row].topk(row_alone.count).indices.tolist()
            assert other.get().partition.tolist() == row_alone.get().partition.tolist()


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are bytes."""
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_whole_text_up_to_a_stop(text: str, stops: list[str]) -> None:
    stream = TextStream(text_of, tuple(stops))
    parts = []
    for token in text.encode("utf-8", "surrogatepass"):
        parts.append(stream.feed(token))
        if stream.matched is not None:
            break
    parts.append(stream.finish())
    streamed = "".join(parts)
    # The stop text that is complete first ends the text; of two that end together, the longer one.
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    if stream.matched is None:
        assert not ends
        assert streamed == text
    else:
        assert text.startswith(streamed + stream.matched)
        assert len(streamed) == min(ends)[1]


@given(st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_are_replaced_at_the_end(tokens: list[int]) -> None:
    stream = TextStream(text_of)
    text = "".join(stream.feed(token) for token in tokens) + stream.finish()
    assert text.replace("\ufffd", "") == text_of(tokens).replace("\ufffd", "")


def test_a_character_is_emitted_once_it_is_complete() -> None:
    stream = TextStream(text_of)
    assert [stream.feed(token) for token in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]


def scheduler_of(**sizes: int) -> Scheduler:
    return Scheduler(**({"slots": 2, "prefill_chunk": 4, "most_waiting": 100} | sizes))


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 5), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 7),
)
def test_every_position_is_read_once_and_in_order(
    requests: list[tuple[int, int, bool]], slots: int, chunk: int
) -> None:
    line = scheduler_of(slots=slots, prefill_chunk=chunk)
    for index, (length, count, wants_all) in enumerate(requests):
        prompt = tuple(range(length))
        line.add(GenerationRequest(id=str(index), prompt=prompt, max_new_tokens=count, prompt_logprobs=wants_all))
    read_by: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
    while line.waiting or line.running:
        while line.next_admissible():
            line.admit(None)
        owners = {sequence.slot: sequence for sequence in line.running}
        assert len(owners) == len(line.running) <= slots
        planned = line.plan()
        assert planned is not None
        assert planned.plan.decode or sum(len(segment.tokens) for segment in planned.plan.segments) <= chunk
        for segment in planned.plan.segments:
            owner = owners[segment.slot]
            assert segment.start == owner.read
            owner.read = segment.end
            read_by[owner.request.id] += segment.tokens
        for row in planned.rows:
            if row.position >= len(row.sequence.request.prompt) - 1:
                row.sequence.generated.append(50)
        for sequence in list(line.running):
            if sequence.generated and sequence.stopped(frozenset()) is not None:
                line.release(sequence)
    for index, (length, count, _) in enumerate(requests):
        assert read_by[str(index)] == [*range(length), *[50] * (count - 1)]


def test_grouped_requests_are_admitted_together_or_not_at_all() -> None:
    line = scheduler_of(most_waiting=3)
    group = [GenerationRequest(id=str(index), prompt=(1, 2), group="run") for index in range(2)]
    with pytest.raises(RequestError, match=r"^id: 0 is open already"):
        line.add(*group, group[0])
    with pytest.raises(QueueFullError, match="0 requests wait, 4 are new, 3 may wait"):
        line.add(*(GenerationRequest(id=f"other {index}", prompt=(1,)) for index in range(4)))
    with pytest.raises(RequestError, match=r"^group: 3 requests of run do not fit 2 slots"):
        line.add(*group, GenerationRequest(id="third", prompt=(1,), group="run"))
    assert (list(line.waiting), line.plan()) == ([], None)
    line.add(*group)
    line.admit(None)
    first = line.plan()
    assert first is not None
    line.running[0].read = 2
    line.running[0].generated.append(5)
    assert line.plan() is None  # the other one's prompt has not been read
    line.waiting.clear()
    alone = line.plan()
    assert alone is not None and alone.plan.decode


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=3), max_size=6))
def test_background_requests_wait_after_all_others_in_their_own_order(calls: list[list[bool]]) -> None:
    line, kinds = scheduler_of(), [kind for call in calls for kind in call]
    ids = iter(range(len(kinds)))
    for call in calls:
        line.add(*(GenerationRequest(id=str(next(ids)), prompt=(1,), is_background=kind) for kind in call))
    expected = [str(place) for kind in (False, True) for place, value in enumerate(kinds) if value is kind]
    assert [request.id for request in line.waiting] == expected


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_the_background_waits_for_so_many_and_no_more(kinds: list[bool]) -> None:
    line = Scheduler(slots=1, prefill_chunk=4, most_waiting=64)
    line.add(*(GenerationRequest(id=str(place), prompt=(1,), is_background=kind) for place, kind in enumerate(kinds)))
    ahead, seen = 0, []
    while line.waiting:
        waits = any(request.is_background for request in line.waiting)
        admitted = line.admit(None)
        ahead = ahead + 1 if waits and not admitted.request.is_background else 0
        assert ahead <= MOST_AHEAD
        seen.append(admitted.request)
        line.release(admitted)
    for kind in (False, True):  # each kind in its order, and the background last
        assert [int(admitted.id) for admitted in seen if admitted.is_background is kind] == [
            place for place, admitted in enumerate(kinds) if admitted is kind
        ]
    assert not seen[0].is_background or all(kinds)


def background_of(name: str, length: int, **fields: Any) -> GenerationRequest:
    return GenerationRequest(id=name, prompt=(1,) * length, max_new_tokens=0, is_background=True, **fields)


def test_the_background_has_half_of_the_slots_and_is_read_last() -> None:
    line = scheduler_of(slots=4)
    line.add(*(background_of(f"b{place}", 4) for place in range(4)))
    while line.next_admissible():
        line.admit(None)
    assert [sequence.request.id for sequence in line.running] == ["b0", "b1"]
    line.add(*(GenerationRequest(id=f"a{place}", prompt=(1,) * 99, max_new_tokens=1) for place in range(3)))
    while line.next_admissible():
        line.admit(None)
    assert [sequence.request.id for sequence in line.running][2:] == ["a0", "a1"]
    read = []
    for _ in range(MOST_AHEAD + 2):
        planned = line.plan()
        assert planned is not None
        (segment,) = planned.plan.segments
        read.append(segment.request_id)
        next(sequence for sequence in line.running if sequence.slot == segment.slot).read = segment.end
    assert read == ["a0"] * MOST_AHEAD + ["b0", "a0"]


def test_a_group_of_the_background_that_generates_fits_its_slots() -> None:
    line = scheduler_of(slots=4)
    group = [dataclasses.replace(background_of(str(place), 1, group="run"), max_new_tokens=2) for place in range(3)]
    with pytest.raises(RequestError, match="3 requests of run do not fit 2 slots of the background"):
        line.add(*group)
    line.add(*group[:2])


def test_new_recipes_starve_no_other() -> None:
    rotation = RecipeRotation[str | None]()
    chosen = [rotation.next([None, f"new {step}", *([f"new {step - 1}"] if step % 2 else [])]) for step in range(40)]
    assert chosen.count(None) >= 13
    assert {rotation.next(["a", "b", "c"]) for _ in range(3)} == {"a", "b", "c"}


def shape(**sizes: int) -> KvCacheShape:
    values = {"layers": 4, "slots": 8, "capacity": 1023, "key_heads": 2, "channels": 64} | sizes
    return KvCacheShape(**values, dtype=torch.bfloat16)


def test_the_size_of_the_cache() -> None:
    assert shape().num_bytes == 2 * 4 * 8 * 1024 * 2 * 64 * 2
    check_memory(shape(), free_bytes=shape().num_bytes * 2, place="cpu")


@given(st.integers(1, 2**26))
def test_the_suggested_sizes_fit_into_memory(free_bytes: int) -> None:
    try:
        check_memory(shape(), free_bytes=free_bytes, place="cpu")
    except CacheTooLargeError as error:
        offers = str(error).partition("what fits: ")[2]
        for offer in filter(None, offers.split(", or ")):
            fields = offer.split()
            check_memory(shape(slots=int(fields[0]), capacity=int(fields[3])), free_bytes=free_bytes, place="cpu")
    else:
        assert shape().num_bytes <= free_bytes


@given(st.binary(max_size=20000))
def test_packed_messages_are_unpacked_unchanged(payload: bytes) -> None:
    parts = iter(_packed(payload))
    assert _unpacked(lambda part: part.copy_(next(parts))) == payload
    assert next(parts, None) is None


def patched(prompt: str, seed: int = 0) -> Recipe:
    action = {"type": "patch", "source": {"prompt": prompt}}
    return Recipe.model_validate(
        {"seed": seed, "perturbations": [{"kind": "calculation", "site": "mlp2", "action": action}]}
    )


PATCHED = patched("a")


@pytest.mark.parametrize(("most_tokens", "most_texts"), [(4, 4), (1000, 2)])
def test_tokens_of_sources_are_stored_within_bounds(
    monkeypatch: pytest.MonkeyPatch, most_tokens: int, most_texts: int
) -> None:
    monkeypatch.setattr(patch_sources, "MAX_CACHED_TOKENS", most_tokens)
    monkeypatch.setattr(patch_sources, "MAX_CACHED_TEXTS", most_texts)
    cache, encoded = SourceCache(), []

    def encode(text: str) -> tuple[int, ...]:
        encoded.append(text)
        return (1, 2)

    for seed, text in enumerate("aabbaca"):
        assert cache.get(patched(text, seed), encode) == {0: (1, 2)}
    assert encoded == ["a", "b", "c"]
    cache.get(patched("b", 0), encode)
    assert encoded[3:] == ["b"]


def drain(line: Scheduler, most: int) -> list[str]:
    """Admit, read and generate until nothing is open; the names of the requests in the order of their ends."""
    ended = []
    for _ in range(most):
        while line.next_admissible():
            line.admit(None)
        if not line.running:
            break
        step = line.plan()
        assert step is not None, "sequences have slots, and none of them is due"
        of_slot = {sequence.slot: sequence for sequence in line.running}
        for segment in step.plan.segments:
            sequence = of_slot[segment.slot]
            sequence.read = segment.end
            if not sequence.is_prefilling and sequence.request.max_new_tokens:
                sequence.generated.append(1)
            if not sequence.is_prefilling and len(sequence.generated) >= sequence.request.max_new_tokens:
                line.release(sequence)
                ended.append(sequence.request.id)
    assert not (line.running or line.waiting)
    return ended


@pytest.mark.parametrize("slots", [1, 8])
def test_a_patched_request_of_the_background_is_admitted_after_its_source(slots: int) -> None:
    line = Scheduler(slots=slots, prefill_chunk=64, most_waiting=64)
    others = [GenerationRequest(id=f"u{place}", prompt=(1,), max_new_tokens=2) for place in range(MOST_AHEAD)]
    group = [GenerationRequest(id=f"g{place}", prompt=(1,), max_new_tokens=2, group="run") for place in range(slots)]
    line.add(*others, *group)
    source = PatchSource(recipe=PATCHED, place=0, lengths={0: 1})
    line.add(GenerationRequest(id="source", prompt=(1,), max_new_tokens=0, source_of=source))
    line.add(dataclasses.replace(background_of("cell", 1, perturbation=PATCHED), max_new_tokens=2))
    assert drain(line, 100)[-2:] == ["source", "cell"]


def test_the_background_generates_more_slowly_while_others_do() -> None:
    line = scheduler_of(slots=4)
    line.add(GenerationRequest(id="user", prompt=(1,), max_new_tokens=60))
    cell = dataclasses.replace(background_of("cell", 1), max_new_tokens=60)
    line.add(dataclasses.replace(cell, compared=ComparedBranch(name="sweep", number=1)))
    line.admit(None)
    line.admit(None)
    steps = []
    for _ in range(4 * (MOST_AHEAD + 1)):
        planned = line.plan()
        assert planned is not None
        for segment in planned.plan.segments:
            sequence = next(sequence for sequence in line.running if sequence.slot == segment.slot)
            sequence.read = segment.end
            sequence.generated.append(1)
            steps.append(sequence.request.id)
    assert steps.count("cell") == 4
