"""kopf's memory of objects, left out: it serves handlers of changes, and costs a copy of each object for each event."""

import kopf

NOTHING: kopf.BodyEssence = {}


class NullDiffBaseStorage(kopf.DiffBaseStorage):
    """Knows no earlier state, and keeps none."""

    def build(self, **_: object) -> kopf.BodyEssence:
        """No part of an object is of interest."""
        return NOTHING

    def fetch(self, **_: object) -> kopf.BodyEssence | None:
        """There is none."""
        return None

    def store(self, **_: object) -> None:
        """It is not kept."""


class NullProgressStorage(kopf.ProgressStorage):
    """Handlers of events have no progress."""

    def fetch(self, **_: object) -> None:
        """There is none."""
        return None

    def store(self, **_: object) -> None:
        """It is not kept."""

    def purge(self, **_: object) -> None:
        """Nothing is there."""

    def touch(self, **_: object) -> None:
        """Nothing is marked."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Nothing of it is ours."""
        return essence
