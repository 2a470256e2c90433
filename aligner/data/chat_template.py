"""Chat templates of a model directory: Jinja, rendered in a sandbox as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aligner.data.tokenizer_files import read_chat_templates, read_special_tokens
from aligner.errors import AlignerError, ConfigError

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with a `role` and a `content`, or `tool_calls`."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that an assistant may call, described as JSON schemas."""

_MARKS = ("\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1")
"""What a template's text has, while it is rendered, where `{% generation %}` begins and ends: no
character of any text."""


class ChatTemplate:
    """The chat template of a model directory, rendered in a sandbox: `chat_template.jinja` where
    there is one.

    Else it is what `tokenizer_config.json` has under `chat_template`; of several templates the one
    called `default`, or for messages with tools, where there is one, `tool_use`.
    """

    def __init__(self, directory: Path, date: str | None = None) -> None:
        """`date` is what `strftime_now` is told, in ISO 8601; the moment's own where None.

        Raises ConfigError for a directory without a chat template, or one that is not Jinja."""
        self._special_tokens = read_special_tokens(directory)
        texts = read_chat_templates(directory)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: _date(date).strftime(form),
        }
        try:
            self._templates = {name: environment.from_string(text) for name, text in texts.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"{directory}: the chat template is not valid Jinja: {error}"
            ) from error

    def render(
        self, messages: Messages, tools: Tools | None = None, *, add_generation_prompt: bool
    ) -> str:
        """The conversation as text; with a generation prompt it ends where the assistant is to
        answer.

        Raises AlignerError for messages that the template refuses.
        """
        return "".join(self.marked(messages, tools, add_generation_prompt=add_generation_prompt))

    def marked(
        self, messages: Messages, tools: Tools | None = None, *, add_generation_prompt: bool = False
    ) -> list[str]:
        """The text in parts, of which every second, from the second on, is what `{% generation %}`
        marks as the assistant's.

        Raises as `render` does.
        """
        text = self._rendered(messages, tools, add_generation_prompt)
        return [part for marked in text.split(_MARKS[0]) for part in marked.split(_MARKS[1])]

    def _rendered(
        self, messages: Messages, tools: Tools | None, add_generation_prompt: bool
    ) -> str:
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        try:
            # Templates ask whether there are tools or documents by comparing with none.
            return self._templates[name].render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._special_tokens,
            )
        # the template is a program of the model's, and fails in its own ways
        except Exception as error:
            raise AlignerError(
                f"the model's chat template cannot render the messages: {error}"
            ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _date(text: str | None) -> datetime:
    return datetime.now() if text is None else datetime.fromisoformat(text)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_QUESTION, _ANSWER = "What is 1+1?", "It is certainly 2"
"""Messages that no template contains."""


def end_of_turn(template: ChatTemplate, tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the token that a template puts after an assistant's message.

    None if the template puts text there that is not an added token of the tokenizer, or if it
    refuses a conversation of one question and its answer.
    """
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
    ]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except AlignerError:
        return None
    _, found, after = text.rpartition(_ANSWER)
    if not found:
        return None
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    following = [token for token in added if after.lstrip().startswith(token)]
    return added[max(following, key=len)] if following else None


class _Generation(Extension):
    """Put `_MARKS` around the text of an assistant: `{% generation %}…{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        begins, ends = (nodes.Output([nodes.TemplateData(mark)]) for mark in _MARKS)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Variables that the block sets are its own, as in the call block of transformers.
        return [begins, nodes.Scope(body), ends]
