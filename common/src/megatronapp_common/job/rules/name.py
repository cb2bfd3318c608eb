"""Rules over the whole object: the API server's own limits for names are wider than those of the types (`metadata`)."""

from megatronapp_common.job.api.metadata import JOB_NAME_PATTERN, MAX_NAME_LENGTH
from megatronapp_common.job.rules.rule import Rule, cel_message

NAME_RULES = (
    Rule(
        id="name-length",
        field=".metadata.name",
        rule=f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        message=f"is too long; write at most {MAX_NAME_LENGTH} characters",
        message_expression=cel_message(
            f"the name has {{self.metadata.name.size()}} characters and is too long; "
            f"write at most {MAX_NAME_LENGTH} characters"
        ),
    ),
    Rule(
        id="name-pattern",
        field=".metadata.name",
        rule=f"self.metadata.name.matches('{JOB_NAME_PATTERN}')",
        message="is not allowed; write lower-case letters, digits and '-', a letter first and a letter or digit last",
    ),
)
