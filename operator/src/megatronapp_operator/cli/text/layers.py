"""Sections of `describe` about the layers of a job's spec: profiles, and the origin of each field."""

import json
from collections import Counter
from typing import Any

from megatronapp_common.job.profiles.effective import LayeredJob, field_origins
from megatronapp_common.job.profiles.locks import SHOWN_CHARACTERS


def profile_rows(layered: LayeredJob) -> list[list[str]]:
    """Return the table of the profiles, the lowest first, with the number of fields that each gives."""
    counts = Counter(field.origin for field in field_origins(layered))
    rows = [["PROFILE", "GENERATION", "FIELDS", "LOCKED"]]
    for profile in layered.profiles:
        locked = ", ".join(profile.locked) or "none"
        rows.append([profile.label, str(profile.generation or "-"), str(counts[profile.label]), locked])
    return rows


def field_rows(layered: LayeredJob) -> list[list[str]]:
    """Return the table of all fields with values and origins."""
    rows = [["FIELD", "VALUE", "ORIGIN"]]
    rows += [[field.field, _value(field.value), field.origin] for field in field_origins(layered)]
    return rows


def _value(value: Any) -> str:  # noqa: ANN401 - plain data
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
