"""Lines through anchors of clocks against fits of one pair at a time by NumPy's least squares."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.align.line_fit import FIT_POINTS, HUBER, ROUNDS, Anchor, offsets_at

NOW_S = 5000.0
ANCHORS = st.lists(
    st.tuples(st.floats(4000, NOW_S), st.floats(-1e9, 1e9), st.floats(0, 1e7)), min_size=1, max_size=3 * FIT_POINTS
)


def plain_offset(window: Sequence[Anchor]) -> tuple[float, float]:
    table = np.array(window)
    best = table[np.argmin(table[:, 2])]
    base, age = table[:, 1] - best[1], table[:, 0] - NOW_S
    if len(table) < FIT_POINTS or np.ptp(age) < 1.0:
        return float(best[1]), float(best[2])
    weight = current = 1.0 / np.maximum(table[:, 2], 1e3)
    design = np.stack([np.ones_like(age), age], axis=1)
    for _ in range(ROUNDS):
        root = np.sqrt(current)
        line = np.linalg.lstsq(design * root[:, None], base * root, rcond=None)[0]
        residual = np.abs(base - design @ line)
        scale = 1.4826 * np.median(residual) + 1.0
        current = weight * np.minimum(1.0, HUBER * scale / np.maximum(residual, 1e-9))
    return float(best[1] + line[0]), float(min(best[2], 3 * 1.4826 * np.median(residual) + 1e3))


@settings(deadline=None, max_examples=50)
@given(windows=st.lists(ANCHORS, max_size=6))
def test_all_pairs_at_once_are_estimated_as_each_by_itself(windows: list[list[Anchor]]) -> None:
    # Ages that nearly agree leave a line open, which each solver then rounds in its way.
    windows = [window for window in windows if np.ptp([time_s for time_s, _, _ in window]) > 10 or len(window) == 1]
    for found, window in zip(offsets_at(windows, NOW_S), windows, strict=True):
        offset, doubt = plain_offset(window)
        reach = (NOW_S - 4000) / np.ptp([time_s for time_s, _, _ in window]) if len(window) > 1 else 1.0
        assert found[0] == pytest.approx(offset, rel=1e-4, abs=1e3 * reach)
        assert found[1] == pytest.approx(doubt, rel=1e-3, abs=1e3 * reach)


def test_drifts_are_followed_through_bad_anchors() -> None:
    random = np.random.default_rng(3)
    windows = []
    for drift in (-50e3, 0.0, 20e3):  # ns a second
        anchors = [(NOW_S - age, 7e6 - drift * age, 2e4) for age in range(64)]
        for place in random.choice(64, 8, replace=False):
            anchors[place] = (anchors[place][0], anchors[place][1] + 5e6, 2e4)
        windows.append(anchors)
    for offset, doubt in offsets_at(windows, NOW_S):
        assert offset == pytest.approx(7e6, abs=2e3)
        assert doubt <= 2e4
    assert offsets_at([], NOW_S) == []
