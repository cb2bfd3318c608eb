"""Headers and rows of the frames that a rank sends of a captured step."""

import time
from collections.abc import Sequence
from typing import Any

from megatronapp_common.frames import Frame, FrameType
from megatronapp_trainer.hooks.sites import known_sites
from megatronapp_trainer.scope.capture.capture_plan import CapturePlan
from megatronapp_trainer.scope.capture.captured_step import CapturedStep, StepReads
from megatronapp_trainer.scope.capture.rank_shard import RankShard
from megatronapp_trainer.scope.capture.reductions import PromptChunk, picture_name
from megatronapp_trainer.scope.transfer.part_frames import FrameSpec, TrackedRow


class FrameDescriber:
    """Describes the frames of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def publisher(self, shard: RankShard, attempt: int) -> Frame:
        """Build the PUBLISHER frame: what this rank holds, and on rank 0 the sizes of the model and the layout."""
        header: dict[str, Any] = {
            "rank": self._rank,
            "attempt": attempt,
            "coordinates": {"tp": shard.tp, "pp": shard.pp, "dp": 0},
            "layers": list(shard.layers),
            "heads": list(shard.heads),
            "keyHeads": list(shard.key_heads),
            "mlp": list(shard.mlp),
            "sites": known_sites(),
        }
        if self._rank == 0:
            header["model"] = shard.model()
            header["layout"] = {"tensor": shard.tensor_size, "pipeline": shard.pipeline_size}
        return Frame(FrameType.SCOPE_PUBLISHER, header)

    def decode_frames(self, plan: CapturePlan, reads: StepReads) -> list[FrameSpec]:
        """Describe the frames of a decode step, in the order in which the hub should get them."""
        specs: list[FrameSpec] = []
        for place, (request, segments) in enumerate(reads):
            rows = request.rows(segments, decode=True)
            for step in sorted({request.step_of(row) for row in rows}):
                part = [row for row in rows if request.step_of(row) == step]
                header = self._header(more=request.more(step, rows)) | {"run": request.name, "step": step}
                specs.append(
                    FrameSpec(
                        group=plan.groups[place],
                        header=header,
                        rows=part,
                        select=[row.token for row in part],
                        pinned=plan.pinned[place],
                    )
                )
        return specs

    def prompt_frames(self, step: CapturedStep) -> list[FrameSpec]:
        """Describe the frames of prompts and probes, in the order in which the hub should get them."""
        specs: list[FrameSpec] = []
        for place, chunk in enumerate(step.works):
            if chunk.tracked.is_probe:
                specs.append(self._probe_frame(chunk, len(step.recipes) + place))
            else:
                specs += self._chunk_frames(step, chunk)
        return specs

    def absent_frames(self, reads: StepReads, *, decode: bool) -> list[Frame]:
        """Build frames that say that this rank has no numbers of these runs, which capture nothing."""
        frames = []
        for request, segments in reads:
            rows = request.rows(segments, decode=decode)
            for step in sorted({request.step_of(row) for row in rows}):
                header = self._header(more=request.more(step, rows)) | {"run": request.name, "step": step}
                frames.append(Frame(FrameType.SCOPE_PART, header | {"rows": [], "tensors": []}))
        return frames

    def _probe_frame(self, chunk: PromptChunk, group: int) -> FrameSpec:
        request, rows = chunk.tracked, chunk.reported_rows
        header = self._header(more=not request.all_read) | {"probe": request.name}
        return FrameSpec(group=group, header=header, rows=rows, select=range(len(rows)), is_probe=True)

    def _chunk_frames(self, step: CapturedStep, chunk: PromptChunk) -> list[FrameSpec]:
        """Describe the pictures of prompts that end in the chunk, then its rows."""
        request, rows = chunk.tracked, chunk.reported_rows
        assert request.recipe is not None
        group = step.recipes.index(request.recipe)
        header = self._header(more=True) | {"run": request.name, "step": 0}
        specs = [
            FrameSpec(group=group, header=header, rows=_picture_row(read.sample), atlas=picture_name(request, read))
            for read in chunk.reads
            if read.ends and request.recipe.attention
        ]
        if rows or request.all_read:
            last = header | {"more": not request.all_read}
            select = range(chunk.rows.start, chunk.rows.stop)
            specs.append(FrameSpec(group=group, header=last, rows=rows, select=select))
        return specs

    def _header(self, *, more: bool) -> dict[str, Any]:
        return {"rank": self._rank, "timeUs": time.time_ns() // 1000, "more": more}


def _picture_row(sample: int) -> Sequence[TrackedRow]:
    return [TrackedRow(token=0, sample=sample, position=0)]
