"""Dependencies that routes take from the application."""

from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from megatronapp_trainer.serve.problems import api_error

if TYPE_CHECKING:
    from megatronapp_trainer.serve.request_broker import RequestBroker
    from megatronapp_trainer.serve.scope.detached_runs import RunStore
    from megatronapp_trainer.serve.served_model import ServedModel
else:
    RequestBroker = ServedModel = RunStore = (
        object  # FastAPI resolves the annotations below and only needs the dependencies
    )


def broker_of(connection: HTTPConnection) -> "RequestBroker":
    """Return the broker, which takes requests."""
    return cast("RequestBroker", connection.app.state.desk)


def model_of(connection: HTTPConnection) -> "ServedModel":
    """Return the model, waiting if it is just being opened.

    Raises ApiError while it is being loaded.
    """
    with connection.app.state.opening:
        model = connection.app.state.model
    if model is None:
        problem = broker_of(connection).problem
        assert problem is not None
        raise api_error(problem)
    return cast("ServedModel", model)


def runs_of(connection: HTTPConnection) -> "RunStore":
    """Return the runs of MegaScope."""
    return cast("RunStore", connection.app.state.runs)


BrokerOf = Annotated[RequestBroker, Depends(broker_of)]
ModelOf = Annotated[ServedModel, Depends(model_of)]
RunsOf = Annotated[RunStore, Depends(runs_of)]
