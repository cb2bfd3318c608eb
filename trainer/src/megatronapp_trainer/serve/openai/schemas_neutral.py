"""Fields that clients of OpenAI and vLLM send by default, accepted if they request what this server does anyway."""

from typing import Annotated, Any

from pydantic import Field

from megatronapp_trainer.serve.body import RequestBody
from megatronapp_trainer.serve.openai.neutral_fields import AllowedValues

LONGEST_NAME = 256
MOST_METADATA = 64
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
_TOOLS = "there are no tools"
_GRAMMAR = "texts are not bound to a grammar"


class NeutralBody(RequestBody):
    """Neutral fields of requests for texts and for answers to messages."""

    user: Name | None = None
    """Has no effect."""
    safety_identifier: Name | None = None
    """Has no effect."""
    prompt_cache_key: Name | None = None
    """Has no effect: each request reads its whole prompt."""
    metadata: Annotated[dict[str, Any], Field(max_length=MOST_METADATA)] | None = None
    """Has no effect: answers are not stored."""
    store: Annotated[bool, AllowedValues((False,), "answers are not stored")] = False
    service_tier: Annotated[str | None, AllowedValues(("auto", "default"), "all requests wait in one queue")] = None
    priority: Annotated[int, AllowedValues((0,), "all requests wait in one queue")] = 0
    presence_penalty: Annotated[float, AllowedValues((0,), "there are no penalties")] = 0
    frequency_penalty: Annotated[float, AllowedValues((0,), "there are no penalties")] = 0
    repetition_penalty: Annotated[float, AllowedValues((1,), "there are no penalties")] = 1
    length_penalty: Annotated[float, AllowedValues((1,), "there is no beam search")] = 1
    best_of: Annotated[int, AllowedValues((1,), "there is no choice among several; n gives several texts")] = 1
    use_beam_search: Annotated[bool, AllowedValues((False,), "there is no beam search")] = False
    min_p: Annotated[float, AllowedValues((0,), "tokens are chosen by temperature, top_k and top_p")] = 0
    min_tokens: Annotated[int, AllowedValues((0,), "a text may end at once, unless ignore_eos is true")] = 0
    logit_bias: Annotated[dict[str, float] | None, AllowedValues(({},), "logits are not biased")] = None
    bad_words: Annotated[list[str] | None, AllowedValues(([],), "no words are excluded")] = None
    allowed_token_ids: Annotated[list[int] | None, AllowedValues((), "all tokens may be chosen")] = None
    logits_processors: Annotated[list[Any] | None, AllowedValues(([],), "the server runs no code of clients")] = None
    include_stop_str_in_output: Annotated[bool, AllowedValues((False,), "a stop text is omitted from the answer")] = (
        False
    )
    spaces_between_special_tokens: Annotated[bool, AllowedValues((True,), "the tokenizer decides on spaces")] = True
    truncate_prompt_tokens: Annotated[int | None, AllowedValues((), "prompts are read whole")] = None
    prompt_logprobs: Annotated[
        int | None, AllowedValues((), "/v1/completions scores prompts by echo: true with logprobs")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, AllowedValues((False,), "top_token_ids and token_ids are always there")
    ] = False
    return_token_ids: bool = True
    """Has no effect: token_ids are always sent."""
    structured_outputs: Annotated[object, AllowedValues((), _GRAMMAR)] = None
    guided_json: Annotated[object, AllowedValues((), _GRAMMAR)] = None
    guided_regex: Annotated[object, AllowedValues((), _GRAMMAR)] = None
    guided_choice: Annotated[object, AllowedValues((), _GRAMMAR)] = None
    guided_grammar: Annotated[object, AllowedValues((), _GRAMMAR)] = None


class NeutralChatBody(NeutralBody):
    """Neutral fields of requests for answers to messages."""

    tools: Annotated[list[Any] | None, AllowedValues(([],), _TOOLS)] = None
    tool_choice: Annotated[str, AllowedValues(("none", "auto"), _TOOLS)] = "none"
    parallel_tool_calls: bool = False
    """Has no effect: there are no tools."""
    functions: Annotated[list[Any] | None, AllowedValues(([],), _TOOLS)] = None
    function_call: Annotated[str, AllowedValues(("none", "auto"), _TOOLS)] = "none"
    modalities: Annotated[list[str] | None, AllowedValues((["text"],), "answers are texts")] = None
    audio: Annotated[object, AllowedValues((), "answers are texts")] = None
    prediction: Annotated[object, AllowedValues((), "nothing is predicted by clients")] = None
    web_search_options: Annotated[object, AllowedValues((), "the web is not searched")] = None
    reasoning_effort: Annotated[str | None, AllowedValues(("none", "medium"), "models have one way to answer")] = None
    verbosity: Annotated[str | None, AllowedValues(("medium",), "models have one way to answer")] = None
    echo: Annotated[bool, AllowedValues((False,), "an answer begins after its messages")] = False
    add_special_tokens: Annotated[bool, AllowedValues((False,), "the chat template writes them")] = False
    continue_final_message: Annotated[
        bool, AllowedValues((False,), "an answer begins a new message; /v1/completions continues a text")
    ] = False
    documents: Annotated[list[Any] | None, AllowedValues(([],), "templates get no documents")] = None
    chat_template: Annotated[str | None, AllowedValues((), "the model's own chat template is used")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, AllowedValues(({},), "templates get messages alone")] = None
