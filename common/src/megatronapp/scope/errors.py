"""Errors of the client of MegaScope."""


class ScopeError(Exception):
    """A request that a hub refused or did not answer, or a number that a session does not hold.

    `code` is the hub's short name of the problem (`not-recorded`, `outside`, ..), `status` the HTTP status or 0.
    """

    def __init__(self, message: str, *, code: str, hint: str = "", status: int = 0) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.code = code
        self.hint = hint
        self.status = status
