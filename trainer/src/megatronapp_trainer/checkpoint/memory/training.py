"""Token of a training in its `--save` directory: what is in memory is resumed by the same training alone.

Files in memory outlive what a user does to the directory. They belong to another training if the directory was emptied
or made again, if a run without checkpoints in memory has used it since, or if its newest checkpoint was removed to go
back to an earlier one.
"""

import json
import logging
import secrets

from megatronapp_trainer.checkpoint.directory import MEMORY_TRAINING, CheckpointDirectory
from megatronapp_trainer.errors import StorageError
from megatronapp_trainer.utils.atomic_files import retry_transient_errors, write_atomically

logger = logging.getLogger(__name__)


def training_token(directory: CheckpointDirectory) -> str:
    """Return the token of the training that continues in a directory, a new one if none does; rank 0 alone.

    The file has the removed checkpoint, too, so that it does not count again at the next start.

    Raises:
        StorageError: the directory cannot be read or written.
    """
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        stored = _stored(directory)
        removed = directory.removed_iteration()
        token = None if stored is None else stored[0]
        if stored is not None and removed not in {None, stored[1]}:
            logger.warning(
                "the checkpoint of step %d, the newest in %s, was removed, so that no state is resumed that was saved "
                "in memory before",
                removed,
                directory.path,
            )
            token = None
        token = token or secrets.token_hex(8)
        if (token, removed) != stored:
            content = json.dumps({"token": token, "removed": removed})
            write_atomically(directory.path / MEMORY_TRAINING, content.encode())
    except OSError as error:
        raise StorageError(f"--save {directory.path} cannot be written: {error.strerror or error}") from error
    return token


def _stored(directory: CheckpointDirectory) -> tuple[str, int | None] | None:
    """Return the token, and the removed checkpoint that has been noted; None if there is no token."""
    try:
        stored = json.loads(retry_transient_errors((directory.path / MEMORY_TRAINING).read_bytes))
        return str(stored["token"]), stored["removed"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
