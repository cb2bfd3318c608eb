"""Order of the passes of a stage: 1F1B, interleaved where a rank holds several chunks."""

from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of a stage."""

    is_forward: bool
    microbatch: int
    chunk: int


def passes(stage: int, stages: int, chunks: int, microbatches: int) -> list[Pass]:
    """Return the passes of a stage in order. Raises ValueError where interleaving does not divide the microbatches."""
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"{microbatches} microbatches do not divide into {stages} stages; interleaving needs a multiple"
        )
    total = microbatches * chunks
    ahead = stages - stage - 1 if chunks == 1 else (stages - stage - 1) * 2 + (chunks - 1) * stages
    warmup = min(total, ahead)

    def unit(number: int, is_forward: bool) -> Pass:
        if chunks == 1:
            return Pass(is_forward, number, 0)
        round_number, place = divmod(number, stages * chunks)
        chunk = place // stages
        return Pass(is_forward, round_number * stages + place % stages, chunk if is_forward else chunks - 1 - chunk)

    order = [unit(number, True) for number in range(warmup)]
    for number in range(total - warmup):
        order += [unit(warmup + number, True), unit(number, False)]
    return order + [unit(number, False) for number in range(total - warmup, total)]


def source(task: Pass, stage: int, stages: int, chunks: int) -> int | None:
    """Return the stage from which a pass receives its input, if it receives any."""
    if task.is_forward:
        return None if stage == 0 and task.chunk == 0 else (stage - 1) % stages
    return None if stage == stages - 1 and task.chunk == chunks - 1 else (stage + 1) % stages


def target(task: Pass, stage: int, stages: int, chunks: int) -> tuple[int, Pass] | None:
    """Return the stage to which a pass sends its output and the pass there, if there is task."""
    step = 1 if task.is_forward else -1
    there = (stage + step) % stages
    chunk = task.chunk + step * (stage == (stages - 1 if task.is_forward else 0))
    return (there, task._replace(chunk=chunk)) if 0 <= chunk < chunks else None
