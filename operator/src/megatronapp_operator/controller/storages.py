"""Empty storages for kopf, whose memory of objects serves handlers of changes and copies each object for each event."""

import kopf

NOTHING: kopf.BodyEssence = {}


class NullDiffBaseStorage(kopf.DiffBaseStorage):
    """Diff base that stores nothing."""

    def build(self, **_: object) -> kopf.BodyEssence:
        return NOTHING

    def fetch(self, **_: object) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: object) -> None:
        """Store nothing; only handlers of changes need a state."""


class NullProgressStorage(kopf.ProgressStorage):
    """Progress storage that stores nothing: handlers of events have no progress."""

    def fetch(self, **_: object) -> None:
        return None

    def store(self, **_: object) -> None:
        """Store nothing; there is no progress."""

    def purge(self, **_: object) -> None:
        """Delete nothing; nothing is stored."""

    def touch(self, **_: object) -> None:
        """Mark nothing; the object stays unchanged."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
