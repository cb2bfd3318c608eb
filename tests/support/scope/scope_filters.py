"""Vector filters for tests: texts of every kind, and data on which sums are exact."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from megatronapp_common.filters.reducers import NAMED, Reducer
from megatronapp_common.filters.shard_plan import compile_reduction_plan, run

CONSTANTS = ["0", "1", "-1", "2", "0.5", "3.", ".25", "1e1"]
SLICES = ["", "[:4]", "[1:5]", "[..., ::2]", "[:, :, -3:]"]


@st.composite
def vectors(draw: st.DrawFn, *, depth: int, slices: bool) -> str:
    """A text of one number for each element."""
    if depth == 0:
        return "data"
    inner = draw(vectors(depth=depth - 1, slices=slices))
    other = draw(st.sampled_from([*CONSTANTS, inner]) | scalars(depth=depth - 1, slices=slices))
    forms = [
        inner,
        f"{inner}.abs()",
        f"torch.square({inner})",
        f"(-{inner})",
        f"{inner}.abs().sqrt()",
        f"({inner} {draw(st.sampled_from('+-*/'))} {other})",
        f"({inner}) ** {draw(st.sampled_from(['2', '3', '-1', '0.5']))}",
        f"({inner} >= {other}).float()",
        f"where({inner} {draw(st.sampled_from(['<', '>', '==', '!=']))} {other}, {inner}, {other})",
    ]
    return draw(st.sampled_from(forms))


@st.composite
def scalars(draw: st.DrawFn, *, depth: int, slices: bool) -> str:
    """A text of one number for each pixel."""
    inner = draw(vectors(depth=max(0, depth - 1), slices=slices))
    slice_text = draw(st.sampled_from(SLICES)) if slices else ""
    reduction = draw(st.sampled_from(["mean", "sum", "max", "min", "amax"]))
    axis = draw(st.sampled_from(["", "-1", "dim=-1"]))
    plain = f"({inner}){slice_text}.{reduction}({axis})"
    if depth < 2:
        return plain
    forms = [
        plain,
        f"sqrt({plain})",
        f"({plain} / {draw(scalars(depth=depth - 1, slices=slices))})",
        f"where({plain} > {draw(st.sampled_from(CONSTANTS))}, {plain}, -2)",
    ]
    return draw(st.sampled_from(forms))


def filters(*, slices: bool = True) -> st.SearchStrategy[str]:
    """Texts that are mostly right: a few have vectors of different lengths, constant comparisons and the like."""
    return st.sampled_from([*NAMED, "histogram(5, -2, 2)"]) | scalars(depth=3, slices=slices)


def exact_data(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    """Small multiples of 1/4: their sums and differences have no rounding."""
    return (np.random.default_rng(seed).integers(-12, 12, shape) / 4).astype(np.float32)


def unsharded(reducer: Reducer, data: npt.NDArray[Any], pixels: int, *, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """The numpy reference of the whole vector: [..., pixels, values]."""
    plan = compile_reduction_plan(reducer, width=data.shape[-1], pixels=pixels)
    return run(plan.program(0), data, dtype=dtype)


def well_conditioned(reducer: Reducer, data: npt.NDArray[Any], pixels: int) -> bool:
    """Rounding changes the answer little: 32 and 64 bits agree, so that no comparison hangs on a last digit."""
    with np.errstate(all="ignore"):
        single = unsharded(reducer, data, pixels).astype(np.float64)
        double = unsharded(reducer, data, pixels, dtype=np.float64)
        scale = np.maximum(np.abs(double), 1e-3)
        near = np.abs(single - double) <= 2e-6 * scale
        return bool((near | (single == double) | (np.isnan(single) & np.isnan(double))).all())
