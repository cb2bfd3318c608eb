"""Fields that clients of OpenAI and vLLM send by default, and that ask for nothing this server does not do anyway."""

from typing import Annotated, Any

from pydantic import Field

from megatronapp_trainer.serve.body import Body
from megatronapp_trainer.serve.openai.neutral_fields import Only

LONGEST_NAME = 256
MOST_METADATA = 64
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
_TOOLS = "there are no tools"
_GRAMMAR = "texts are not bound to a grammar"


class NeutralBody(Body):
    """Neutral fields of requests for texts and for answers to messages."""

    user: Name | None = None
    """Has no effect."""
    safety_identifier: Name | None = None
    """Has no effect."""
    prompt_cache_key: Name | None = None
    """Has no effect: each request reads its whole prompt."""
    metadata: Annotated[dict[str, Any], Field(max_length=MOST_METADATA)] | None = None
    """Has no effect: answers are not stored."""
    store: Annotated[bool, Only((False,), "answers are not stored")] = False
    service_tier: Annotated[str | None, Only(("auto", "default"), "all requests wait in one queue")] = None
    priority: Annotated[int, Only((0,), "all requests wait in one queue")] = 0
    presence_penalty: Annotated[float, Only((0,), "there are no penalties")] = 0
    frequency_penalty: Annotated[float, Only((0,), "there are no penalties")] = 0
    repetition_penalty: Annotated[float, Only((1,), "there are no penalties")] = 1
    length_penalty: Annotated[float, Only((1,), "there is no beam search")] = 1
    best_of: Annotated[int, Only((1,), "there is no choice among several; n gives several texts")] = 1
    use_beam_search: Annotated[bool, Only((False,), "there is no beam search")] = False
    min_p: Annotated[float, Only((0,), "tokens are chosen by temperature, top_k and top_p")] = 0
    min_tokens: Annotated[int, Only((0,), "a text may end at once, unless ignore_eos is true")] = 0
    logit_bias: Annotated[dict[str, float] | None, Only(({},), "logits are not biased")] = None
    bad_words: Annotated[list[str] | None, Only(([],), "no words are kept out")] = None
    allowed_token_ids: Annotated[list[int] | None, Only((), "all tokens may be chosen")] = None
    logits_processors: Annotated[list[Any] | None, Only(([],), "the server runs no code of clients")] = None
    include_stop_str_in_output: Annotated[bool, Only((False,), "a stop text is left out of the answer")] = False
    spaces_between_special_tokens: Annotated[bool, Only((True,), "the tokenizer decides on spaces")] = True
    truncate_prompt_tokens: Annotated[int | None, Only((), "prompts are read whole")] = None
    prompt_logprobs: Annotated[int | None, Only((), "/v1/completions scores prompts by echo: true with logprobs")] = (
        None
    )
    return_tokens_as_token_ids: Annotated[bool, Only((False,), "top_token_ids and token_ids are always there")] = False
    return_token_ids: bool = True
    """Has no effect: token_ids are always there."""
    structured_outputs: Annotated[object, Only((), _GRAMMAR)] = None
    guided_json: Annotated[object, Only((), _GRAMMAR)] = None
    guided_regex: Annotated[object, Only((), _GRAMMAR)] = None
    guided_choice: Annotated[object, Only((), _GRAMMAR)] = None
    guided_grammar: Annotated[object, Only((), _GRAMMAR)] = None


class NeutralChatBody(NeutralBody):
    """Neutral fields of requests for answers to messages."""

    tools: Annotated[list[Any] | None, Only(([],), _TOOLS)] = None
    tool_choice: Annotated[str, Only(("none", "auto"), _TOOLS)] = "none"
    parallel_tool_calls: bool = False
    """Has no effect: there are no tools."""
    functions: Annotated[list[Any] | None, Only(([],), _TOOLS)] = None
    function_call: Annotated[str, Only(("none", "auto"), _TOOLS)] = "none"
    modalities: Annotated[list[str] | None, Only((["text"],), "answers are texts")] = None
    audio: Annotated[object, Only((), "answers are texts")] = None
    prediction: Annotated[object, Only((), "nothing is predicted by clients")] = None
    web_search_options: Annotated[object, Only((), "nothing is looked up")] = None
    reasoning_effort: Annotated[str | None, Only(("none", "medium"), "models have one way to answer")] = None
    verbosity: Annotated[str | None, Only(("medium",), "models have one way to answer")] = None
    echo: Annotated[bool, Only((False,), "an answer begins after its messages")] = False
    add_special_tokens: Annotated[bool, Only((False,), "the chat template writes them")] = False
    continue_final_message: Annotated[
        bool, Only((False,), "an answer begins a new message; /v1/completions goes on from a text")
    ] = False
    documents: Annotated[list[Any] | None, Only(([],), "templates get no documents")] = None
    chat_template: Annotated[str | None, Only((), "the model's own chat template is used")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Only(({},), "templates get messages alone")] = None
