"""The chat template of a model, which makes a prompt of messages.

Templates are Jinja programs that belong to the model. They are rendered in Jinja's sandbox, in the environment that
`transformers` gives them.
"""

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from megatronapp_trainer.data.tokenizer_folder import CONFIG, read_json, read_text, special_tokens

TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
_DEFAULT = "default"


class TemplateError(Exception):
    """A template refused the messages, or could not be rendered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template, and the special tokens that it may name. `flaw`: why it cannot be used."""

    text: str | None = None
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Texts of special tokens by name, such as `bos_token`."""
    flaw: str | None = None

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.text is not None
        return _environment().from_string(self.text)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render the text of these messages.

        Raises TemplateError.
        """
        try:
            return self._compiled.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateError(f"{type(error).__name__}: {error}") from error


def read_template(*folders: pathlib.Path) -> ChatTemplate:
    """Read the first template in these folders, in the order of `transformers`; one without text if none exists.

    Raises DataError for files that cannot be read.
    """
    tokens: dict[str, str] = {}
    for folder in folders:
        config = read_json(folder / CONFIG)
        tokens = special_tokens(folder) or tokens
        text = _template_in(folder, config)
        if text is not None:
            return compiled(text, tokens)
    return ChatTemplate(tokens=tokens)


def _template_in(folder: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE).is_file():
        return read_text(folder / TEMPLATE)
    found = read_json(folder / TEMPLATE_JSON).get("chat_template", config.get("chat_template"))
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get(_DEFAULT)
    return found if isinstance(found, str) else None


def compiled(text: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """Return the template of a text; one without text, but with its flaw, if Jinja cannot compile it."""
    try:
        _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        return ChatTemplate(tokens=tokens, flaw=f"line {error.lineno}: {error.message}")
    except RecursionError:
        return ChatTemplate(tokens=tokens, flaw="its expressions or blocks are nested too deeply")
    except Exception as error:  # Jinja makes a Python program of it, which Python may refuse in any way
        return ChatTemplate(tokens=tokens, flaw=f"{type(error).__name__}: {error}")
    return ChatTemplate(text=text, tokens=tokens)


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's text; it changes nothing of it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja's base class has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parse the statements within, in a separate scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = lambda style: datetime.datetime.now().strftime(style)
    return found


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,  # noqa: ANN401 - as json.dumps takes them
    sort_keys: bool = False,
) -> str:
    """Implement the filter of `transformers`: the same parameters in the same order, and no escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
