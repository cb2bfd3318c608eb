"""What routes find at the application."""

from typing import TYPE_CHECKING, Annotated, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from megatronapp_trainer.serve.problems import api_error

if TYPE_CHECKING:
    from megatronapp_trainer.serve.request_broker import Desk
    from megatronapp_trainer.serve.scope.detached_runs import Runs
    from megatronapp_trainer.serve.served_model import ServedModel
else:
    Desk = ServedModel = Runs = object  # FastAPI resolves the annotations below and only needs the dependencies


def desk_of(connection: HTTPConnection) -> "Desk":
    """Where requests go."""
    return cast("Desk", connection.app.state.desk)


def model_of(connection: HTTPConnection) -> "ServedModel":
    """The model. Raises ApiError while it is being loaded; who asks in the moment of opening waits for its end."""
    with connection.app.state.opening:
        model = connection.app.state.model
    if model is None:
        problem = desk_of(connection).problem
        assert problem is not None
        raise api_error(problem)
    return cast("ServedModel", model)


def runs_of(connection: HTTPConnection) -> "Runs":
    """The runs of MegaScope."""
    return cast("Runs", connection.app.state.runs)


DeskOf = Annotated[Desk, Depends(desk_of)]
ModelOf = Annotated[ServedModel, Depends(model_of)]
RunsOf = Annotated[Runs, Depends(runs_of)]
