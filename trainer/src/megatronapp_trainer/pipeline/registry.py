"""All pipeline schedules by name."""

from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.megatron_schedules import StaticSchedule
from megatronapp_trainer.pipeline.schedule import PipelineSchedule, ScheduleBuilder, ScheduleContext

SCHEDULES: dict[str, ScheduleBuilder] = {"static": StaticSchedule}


def create_schedule(name: str, context: ScheduleContext) -> PipelineSchedule:
    """Build the schedule of this name. Raises UsageError for a name that is not registered."""
    builder = SCHEDULES.get(name)
    if builder is None:
        raise UsageError(f"there is no pipeline schedule {name!r}; take one of: {', '.join(SCHEDULES)}")
    return builder(context)
