"""Chat templates: rendered as `transformers` renders them, found where it finds them, refused with a reason."""

import json
import pathlib
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from megatronapp_trainer.data.chat_template import ChatTemplate, TemplateError, read_template
from megatronapp_trainer.errors import DataError

TEMPLATES = {
    "marked-turns": (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if loop.first and message.role != 'system' %}[system]be brief[end]\n{% endif %}\n"
        "[{{ message['role'] }}]{{ message['content'] | trim }}[end]\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "with-tools": "{% if tools is not none %}tools{% endif %}{{ messages | tojson }}{{ messages | tojson(indent=1) }}",
    "loop-controls": (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{{ loop.index0 }}:{{ message.content }};{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ eos_token }}"
    ),
    "marked-generation": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson(ensure_ascii=False) }}{{ messages | tojson(ensure_ascii=True) }}"
        "{{ messages | tojson(True, 2) }}{{ messages | tojson(indent=2, separators=(',', ' : '), sort_keys=True) }}"
        "{{ 'a<b>&' | tojson }}"
    ),
    "own-scope": (
        "{% set end = '1' %}{% generation %}{% set end = '2' %}{{ end }}{% endgeneration %}{{ end }}"
        "{% for message in messages %}{% generation %}{% if loop.first %}{{ message.content }}{% endif %}"
        "{% endgeneration %}{% endfor %}"
    ),
    "date": "{{ strftime_now('%Y') | length }}{{ strftime_now is defined }}{{ raise_exception is defined }}",
    "namespaces": (
        "{% set found = namespace(system='none') %}{% for message in messages %}{% if message.role == 'system' %}"
        "{% set found.system = message.content %}{% endif %}{% endfor %}{{ found.system }}|{{ messages[-1].content }}"
        "{% if messages[-1]['name'] is defined %}{{ messages[-1].name }}{% endif %}"
    ),
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": '  Who is <Ahab> & "who" isn\'t?\n'}],
    [
        {"role": "system", "content": "né à Paris, 日本語"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three", "name": "Ishmael"},
    ],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast  # half a second, which all processes would take to collect tests

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, chat_template=template, **TOKENS)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_become_the_text_that_transformers_makes(name: str, prompt: bool) -> None:
    ours, other = ChatTemplate(text=TEMPLATES[name], tokens=TOKENS), theirs(TEMPLATES[name])
    for messages in CONVERSATIONS:
        expected = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.render(messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("kind", ["jinja", "config", "named", "json"])
def test_a_template_is_found_where_transformers_finds_it(tmp_path: pathlib.Path, kind: str) -> None:
    template, config = TEMPLATES["marked-turns"], dict[str, Any](TOKENS)
    if kind == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template)
        config["chat_template"] = "an older one"
    elif kind == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    else:
        named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": template}]
        config["chat_template"] = named if kind == "named" else template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_template(tmp_path / "nothing", tmp_path)
    assert found == ChatTemplate(text=template, tokens=TOKENS)


def test_a_folder_that_transformers_wrote_is_read(tmp_path: pathlib.Path) -> None:
    from transformers import AutoTokenizer

    theirs(TEMPLATES["namespaces"]).save_pretrained(tmp_path)
    found = read_template(tmp_path)
    assert found.text == TEMPLATES["namespaces"]
    assert TOKENS.items() <= found.tokens.items()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == found.text


def test_a_model_without_a_template_has_its_special_tokens_all_the_same(tmp_path: pathlib.Path) -> None:
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "additional_special_tokens": []}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert read_template(tmp_path) == ChatTemplate(tokens=TOKENS)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.x }}", "UndefinedError|undefined|no element"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable|sandbox"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10000000) %}x{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_refuses_or_fails_gives_the_reason(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(text=template).render([{"role": "user", "content": "a"}], add_generation_prompt=True)


def test_a_template_that_is_no_jinja_is_named_with_its_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("fine\n{% for x in %}\n")
    found = read_template(tmp_path)
    assert found.text is None and found.flaw is not None and found.flaw.startswith("line 2: ")


DEEP = 30_000
FLAWED = {
    "parentheses": ("{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}", "its expressions or blocks are nested too deeply"),
    "lists": ("{{ " + "[" * DEEP + "]" * DEEP + " }}", "its expressions or blocks are nested too deeply"),
    "conditions": ("{% if a %}" * DEEP + "{% endif %}" * DEEP, "its expressions or blocks are nested too deeply"),
    "loops": ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many statically nested blocks"),
    "filter": ("{{ messages | nothing }}", "line 1: No filter named 'nothing'"),
    "tag": ("{% nothing %}", "line 1: Encountered unknown tag 'nothing'"),
}


@pytest.mark.parametrize("kind", FLAWED)
def test_a_template_that_cannot_be_compiled_has_a_flaw_and_the_model_is_served(
    kind: str, tmp_path: pathlib.Path
) -> None:
    template, flaw = FLAWED[kind]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **TOKENS}))
    found = read_template(tmp_path)
    assert found.text is None and found.tokens == TOKENS
    assert found.flaw is not None and found.flaw.startswith(flaw)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": ' + "[" * 100_000])
def test_settings_that_cannot_be_read_are_named(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(DataError, match="tokenizer_config"):
        read_template(tmp_path)
