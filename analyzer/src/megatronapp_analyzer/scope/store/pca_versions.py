"""Versions of PCA bases."""

import dataclasses


@dataclasses.dataclass(slots=True)
class PcaVersions:
    """Versions that the hub has given, and that it has seen. A version counts fits."""

    newest: int = 0
    """Version of the newest basis; coordinates in another one are dropped."""
    seen: int = 0
    """The largest version that ranks have named: another hub may have given them a basis before."""

    def note(self, version: int) -> None:
        """Remember a version that a rank or a recorded session names."""
        self.seen = max(self.seen, version)

    def advance(self) -> None:
        """Begin the next version."""
        self.newest = max(self.newest, self.seen) + 1
