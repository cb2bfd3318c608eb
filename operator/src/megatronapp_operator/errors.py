"""Errors of megatronapp_operator.

OperatorError
├── ManifestError     a file that is not a MegatronJob we can run
├── JobConflictError  a job of this name is running
├── JobNotFoundError  no job of this name
├── HubError          the job's hub rejected a request, or cannot be reached
├── SettingsError     a flag, file or variable cannot be used
└── BackendError      the backend cannot do what was requested
"""


class OperatorError(Exception):
    """Base of every error of this package. Its text says what is wrong, where, and what to do instead."""


class ManifestError(OperatorError):
    """A file that is not a MegatronJob we can run."""


class JobConflictError(OperatorError):
    """A job of this name is running, or its state is held by another process."""


class JobNotFoundError(OperatorError):
    """No job of this name is known."""


class HubError(OperatorError):
    """The job has no hub, the hub rejected a request, or it cannot be reached."""


class BackendError(OperatorError):
    """The backend cannot do what was requested, such as finding a free port."""


class SettingsError(OperatorError):
    """A flag, a file or a variable of the command line cannot be used."""
