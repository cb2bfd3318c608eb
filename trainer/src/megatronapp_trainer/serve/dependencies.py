"""Dependencies that routes take from the application."""

from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from megatronapp_trainer.serve.problems import http_error
from megatronapp_trainer.serve.request_broker import RequestBroker
from megatronapp_trainer.serve.served_model import ServedModel


def broker_of(connection: HTTPConnection) -> RequestBroker:
    """Return the broker, which takes requests."""
    return cast("RequestBroker", connection.app.state.broker)


def model_of(connection: HTTPConnection) -> ServedModel:
    """Return the model, waiting if it is just being opened.

    Raises HttpError while it is being loaded.
    """
    with connection.app.state.opening:
        model = connection.app.state.model
    if model is None:
        problem = broker_of(connection).problem
        assert problem is not None
        raise http_error(problem)
    return cast("ServedModel", model)


BrokerOf = Annotated[RequestBroker, Depends(broker_of)]
ModelOf = Annotated[ServedModel, Depends(model_of)]
