"""The rank whose log is shown by default, as the trainer and the command line compute it."""

import pytest
import rendered
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatronapp_common.job import MegatronJob, megatron_arguments
from megatronapp_operator.cli.follower import reporting_rank
from megatronapp_trainer.launch.ranks.roles import fbd_world_of_flags
from megatronapp_trainer.parallel.layout import layout_from_environment

MOST_RANKS = 64
"""Most ranks that a manifest may put on a node."""


@st.composite
def patches(draw: st.DrawFn) -> rendered.Object:
    """Specs of all layouts of MegaFBD, and of trainings without it."""
    tensor, pipeline = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    merged, enabled, apart = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    served = draw(st.integers(1, 2)) if enabled and not merged else 1
    data = served * draw(st.integers(1, 2))
    backward = tensor * pipeline * data
    forward = backward // (tensor if merged else served)
    shared = backward + forward if enabled and not apart else backward
    assume(shared <= MOST_RANKS)
    fbd = {"enabled": True, "ship": "full", "ignoreForwardTensorParallel": merged, "backwardPerForward": served}
    return {
        "nodes": 1,
        "procPerNode": shared,
        "parallelism": {"tensor": tensor, "pipeline": pipeline, "data": data},
        "model": {"numLayers": 6, "hiddenSize": 64, "numAttentionHeads": 8, "attentionDropout": 0, "hiddenDropout": 0},
        "training": {"globalBatchSize": 8 * data},
        **({"fbd": fbd | ({"forward": {"nodes": 1}} if apart else {})} if enabled else {}),
    }


def reporters(job: MegatronJob) -> list[int]:
    """Return the ranks that the trainer lets report, of all that the launchers start."""
    size, layout = job.world.world_size, job.spec.parallelism
    fbd, found = fbd_world_of_flags(megatron_arguments(job), size), []
    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}.items():
                patch.setenv(name, str(value))
            made = layout_from_environment(
                tensor_size=layout.tensor, pipeline_size=layout.pipeline, virtual_size=1, fbd=fbd
            )
        if made.is_reporter:
            found.append(made.global_rank)
    return found


@settings(max_examples=60, deadline=None)
@given(patch=patches())
def test_the_shown_rank_reports(patch: rendered.Object) -> None:
    job = rendered.make_job(patch)
    assert [reporting_rank(job)] == reporters(job)


@pytest.mark.parametrize(("apart", "rank"), [(False, 2), (True, 1)])
def test_a_backward_rank_reports(*, apart: bool, rank: int) -> None:
    fbd = {"enabled": True, "ship": "full"} | ({"forward": {"nodes": 1}} if apart else {})
    world = {"nodes": 1, "procPerNode": 2 if apart else 4, "parallelism": {"pipeline": 2, "data": 1}}
    job = rendered.make_job({**world, "fbd": fbd, "model": {"attentionDropout": 0, "hiddenDropout": 0}})
    assert reporting_rank(job) == rank
