"""Rules for the flags of windows of detailed spans."""

from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig


def trace_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    logging, windows = config.logging, config.logging.trace_windows
    if windows is None:
        return
    yield from require(
        logging.trace,
        "--trace-dir, --trace-interval, --continuous-trace-iterations and --trace-granularity need --trace",
    )
    yield from require(
        windows.granularity == "base" or not config.fbd.enabled,
        "--trace-granularity full: the backward ranks of --forward-backward-disaggregating run no modules whose parts "
        "could be timed; write --trace-granularity base",
    )
    several = config.virtual_size > 1 or config.dpp.use_dpp or config.fbd.enabled
    yield from require(
        logging.trace_dir is None or not several,
        "--trace-dir: files of MegatronApp's form have no place for virtual pipeline stages, --use-dpp or "
        "--forward-backward-disaggregating; leave it out, and write spans with megatronapp trace export JOB -o FILE",
    )
