"""All pipeline schedules by name."""

from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.megatron_schedules import StaticSchedule
from megatronapp_trainer.pipeline.schedule import PipelineSchedule, ScheduleBuilder, ScheduleContext


def _dynamic(context: ScheduleContext) -> PipelineSchedule:
    # Imported late: megatron-core must not be imported before `prepare_device` has chosen how.
    from megatronapp_trainer.pipeline.dynamic import DynamicSchedule

    return DynamicSchedule(context)


SCHEDULES: dict[str, ScheduleBuilder] = {"static": StaticSchedule, "dynamic": _dynamic}


def create_schedule(name: str, context: ScheduleContext) -> PipelineSchedule:
    """Build the schedule of this name. Raises UsageError for a name that is not registered."""
    builder = SCHEDULES.get(name)
    if builder is None:
        raise UsageError(f"there is no pipeline schedule {name!r}; take one of: {', '.join(SCHEDULES)}")
    return builder(context)
