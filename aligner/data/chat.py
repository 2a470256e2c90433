"""Chat messages as text, by the chat template of a model's directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aligner.errors import AlignerError, ConfigError

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with a `role` and a `content`."""


class ChatTemplate:
    """The chat template of a model directory: Jinja, rendered in a sandbox, as Hugging Face defines it.

    It is `chat_template.jinja` where there is one, else what `tokenizer_config.json` has under `chat_template`; of
    several templates it is the one called `default`.
    """

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for a directory without a chat template, or one that is not Jinja."""
        self._settings = _tokenizer_config(directory)
        text = _template_text(directory, self._settings)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{directory}: its chat template cannot be read: {error}") from error

    def render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        """The conversation as text; with a generation prompt it ends where the assistant is to answer.

        Raises AlignerError for messages that the template refuses.
        """
        tokens = {key: _token_text(value) for key, value in self._settings.items() if key.endswith("_token")}
        try:
            # Templates ask whether there are tools or documents by comparing with none.
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **tokens
            )
        except Exception as error:  # the template is a program of the model's, and fails in its own ways
            raise AlignerError(f"the model's chat template refuses the messages: {error}") from error


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: not a JSON object but {type(settings).__name__}")
    return settings


def _template_text(directory: Path, settings: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    text = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if isinstance(text, list):
        text = next(
            (entry.get("template") for entry in text if isinstance(entry, dict) and entry.get("name") == "default"), None
        )
    if not isinstance(text, str):
        raise ConfigError(
            f"{directory}: the data has chat messages, but the model has no chat template, neither chat_template.jinja nor a"
            " `chat_template` in tokenizer_config.json; add one, or give plain text"
        )
    return text


def _token_text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as it is: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what an assistant says and changes no text."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
