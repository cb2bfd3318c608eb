"""Orders in the control document of rank 0's worker, which the agent writes and rank 0 reads."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from megatronapp_common.control.orders import Order
from megatronapp_common.errors import DocumentError, OrderError

log = logging.getLogger(__name__)


class OrderDocument(Protocol):
    """Methods used of `DocumentReader`."""

    def read_new(self) -> dict[str, Any] | None:
        """Return the document if it changed. Raises DocumentError."""


class OrderReader:
    """Reads orders of this attempt that were not taken yet. A document that cannot be read changes nothing."""

    def __init__(self, document: OrderDocument, *, attempt: int) -> None:
        self._document = document
        self._attempt = attempt
        self._newest = 0
        self._waiting: list[Order] = []
        self._complaint = ""
        """Reason why the document was last ignored; one that stays unreadable is reported once."""
        self.renewals = 0
        """Number that grows while a client controls the training."""

    def read(self) -> list[Order]:
        """Return the orders that were not taken yet, in order of their numbers."""
        try:
            document = self._document.read_new()
            if document is not None:
                self._take_in(document.get("training"))
        except (DocumentError, OrderError, ValueError, TypeError) as error:  # another process wrote the document
            if str(error) != self._complaint:
                log.warning("orders in the control document are ignored: %s", error)
            self._complaint = str(error)
        return self._waiting

    def taken(self, orders: list[Order]) -> None:
        """Remove orders that are on their way to the ranks."""
        numbers = {order.number for order in orders}
        self._waiting = [order for order in self._waiting if order.number not in numbers]

    def _take_in(self, part: object) -> None:
        if not isinstance(part, Mapping) or part.get("attempt") != self._attempt:
            return
        self.renewals = int(part.get("renewals", 0))
        orders = sorted((Order.from_json(entry) for entry in part.get("orders", ())), key=lambda order: order.number)
        new = [order for order in orders if order.number > self._newest]
        self._waiting = [*self._waiting, *new]
        if new:
            self._newest = new[-1].number
