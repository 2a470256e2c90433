"""Chat templates of a model directory, and chat messages in the form that they expect.

`ChatTemplate` renders Jinja templates in a sandbox, as transformers does, and reports content that
a template drops. The `normalize_…` functions convert messages, tools and template variables from
the forms in which datasets and OpenAI clients write them.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from aligner.data.control_tokens import compile_control_pattern, escape
from aligner.data.template_sandbox import LimitedEnvironment
from aligner.data.tokenizer_files import read_chat_templates, read_special_tokens
from aligner.errors import AlignerError, ConfigError
from aligner.file_limits import parse_json

_log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation, each with a `role`, and with a `content` or `tool_calls`."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that an assistant may call, as JSON schemas."""

LearnedTurns = Literal["none", "last", "all"]
"""Messages of the assistant that are trained on."""

# Markers of the beginning and the end of a `{% generation %}` block in rendered text. They are
# Unicode noncharacters, which no text contains.
_GENERATION_MARKERS = ("\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1")

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the field for the reasoning of an assistant's message; aligner uses the first."""
STANDARD_ROLES = frozenset(("system", "user", "assistant", "tool"))
"""Message roles that most chat templates support."""


# Keys of a message that is only a text.
_TEXT_KEYS = {"role", "content"}


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect.

    Entries with the value null are removed at any depth: `datasets` adds them to give all rows one
    schema, and OpenAI's clients send `content: null` next to tool calls. Arguments of tool calls
    that are JSON text, as in OpenAI's API, become objects; nulls inside the text are values and
    remain. A call without arguments gets empty arguments (`{}`). The reasoning of a message is also
    available as `reasoning_content`.

    Raises:
        AlignerError: The arguments of a tool call are not the JSON text of an object.
    """
    return [_normalize_message(message, index) for index, message in enumerate(messages)]


def normalize_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return tool schemas, which may be JSON text, as a list; None without tools.

    Raises:
        AlignerError: The value is not a list of JSON objects.
    """
    if isinstance(tools, str) and not tools.strip():
        return None
    tools = _decode_field(tools, "tools")
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise AlignerError("`tools` must be a list of JSON objects (tool schemas)")
    return [dict(tool) for tool in tools]


def normalize_variables(variables: Any) -> dict[str, Any]:
    """Return `chat_template_kwargs`, which may be JSON text, as a dict; empty for None.

    Raises:
        AlignerError: The value is not a JSON object.
    """
    variables = _decode_field(variables, "chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise AlignerError(
            f"`chat_template_kwargs` must be a JSON object, got {type(variables).__name__}"
        )
    return dict(variables)


def remove_nulls(value: Any) -> Any:
    """Return a JSON value without the null entries of its objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: remove_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [remove_nulls(entry) for entry in value]
    return value


def _decode_field(value: Any, field: str) -> Any:
    """Return the JSON value of a field that may be text; nulls inside the text remain."""
    if not isinstance(value, str):
        return remove_nulls(value)
    try:
        return parse_json(value)
    except ValueError as error:
        raise AlignerError(f"`{field}` is not valid JSON: {error}") from error


def _normalize_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if message.keys() == _TEXT_KEYS and all(type(text) is str for text in message.values()):
        return dict(message)  # the usual form, which needs no changes
    normal: dict[str, Any] = remove_nulls(message)
    if not normal.get("tool_calls", True):
        del normal["tool_calls"]
    calls = normal.get("tool_calls")
    if isinstance(calls, list):
        normal["tool_calls"] = [
            _decode_arguments(call, f"messages[{index}].tool_calls[{call_index}]")
            for call_index, call in enumerate(calls)
        ]
    reasoning = next((normal[name] for name in REASONING_FIELDS if normal.get(name)), None)
    if reasoning is not None:
        normal[REASONING_FIELDS[0]] = reasoning
    return normal


def _decode_arguments(call: Any, path: str) -> Any:
    """Return a tool call with its arguments as an object.

    Args:
        call: The call, or the object `function` inside a call.
        path: The path of the call in the messages, for error messages.
    """
    if not isinstance(call, dict):
        return call
    if "function" in call:
        function = call["function"]
        return {**call, "function": _decode_arguments(function, f"{path}.function")}
    # Templates read the arguments of every call.
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return {**call, "arguments": arguments}
    try:
        decoded = parse_json(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise AlignerError(f"{path}.arguments: not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise AlignerError(f"{path}.arguments: must be a JSON object, got {type(decoded).__name__}")
    return {**call, "arguments": decoded}


class ChatTemplate:
    """The chat template of a model directory, rendered in a sandbox.

    The template is `chat_template.jinja` if the file exists, otherwise the entry `chat_template` of
    `tokenizer_config.json`. If there are several templates, messages with tools use `tool_use` if
    it exists, and all other messages use `default`.
    """

    def __init__(
        self,
        directory: Path,
        date: str | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        control_tokens: Sequence[str] = (),
        sanitizes: bool = True,
    ) -> None:
        """Read the templates of a model directory.

        Args:
            directory: The model directory.
            date: The date that `strftime_now` formats, in ISO 8601; None for the current date.
            variables: Further variables of the template (`chat_template_kwargs`).
            control_tokens: Texts of the tokenizer's control tokens.
            sanitizes: Whether control tokens in the text of user, system and tool messages are
                encoded as plain characters; otherwise a warning is logged.

        Raises:
            ConfigError: The directory has no chat template, or it is not valid Jinja.
        """
        self._directory = directory
        self._variables = normalize_variables(variables)
        self._control_pattern = compile_control_pattern(list(control_tokens))
        self._sanitizes = sanitizes
        self._special_tokens = read_special_tokens(directory)
        texts = self._texts = read_chat_templates(directory)
        self._losses: dict[str, list[str]] = {}  # by the form of a conversation
        self._checked_texts: set[tuple[Any, ...]] = set()  # forms of conversations without losses
        self._logged_messages: set[str] = set()

        environment = self._environment = LimitedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.add_filter("tojson", _to_json)
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: _parse_date(date).strftime(format),
        }
        try:
            self._templates = {name: environment.from_string(text) for name, text in texts.items()}
        # Jinja computes constant expressions here, and nests its own calls like the template.
        except Exception as error:
            raise ConfigError(
                f"{directory}: the chat template is not valid Jinja: {error}"
            ) from error

    def mentions(self, text: str) -> bool:
        """Return whether the source of a template contains a text."""
        return any(text in source for source in self._texts.values())

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        learned_turns: LearnedTurns = "none",
    ) -> str:
        """Return the conversation as text.

        A control token in the text of a user, system or tool message is marked as plain characters
        (`aligner.data.control_tokens`).

        Args:
            messages: The messages, in any form that `normalize_messages` accepts.
            tools: The tools, in any form that `normalize_tools` accepts.
            add_generation_prompt: Whether the text ends with the start of the assistant's next
                message.
            variables: Further variables of the template, which take precedence over those of all
                conversations (`chat_template_kwargs`).
            learned_turns: The assistant's messages that are trained on. A warning is logged if the
                template drops their reasoning.

        Raises:
            AlignerError: The template rejects the messages, or does not support the role of a
                message.
        """
        parts = self.render_parts(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            learned_turns=learned_turns,
        )
        return "".join(parts)

    def render_parts(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        learned_turns: LearnedTurns = "none",
    ) -> list[str]:
        """Return the conversation as text in parts, split at the template's `{% generation %}`.

        The parts with odd indices (the second, the fourth, …) are the text that `{% generation %}`
        marks as the assistant's. See `render` for the arguments and errors.
        """
        all_variables = {**self._variables, **normalize_variables(variables)}
        self._check_variables(all_variables)
        tools = normalize_tools(tools)
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        normal = self._adapt_to_template(normalize_messages(messages), name)
        text = self._render_template(
            name, self._sanitize(normal), tools, add_generation_prompt, all_variables
        )

        self._check_losses(name, normal, tools, all_variables, learned_turns)
        start_marker, end_marker = _GENERATION_MARKERS
        return [part for block in text.split(start_marker) for part in block.split(end_marker)]

    def _render_template(
        self,
        name: str,
        messages: Messages,
        tools: Tools | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the text of the template `name`, and handle messages without a content."""

        def render(messages: Messages) -> str:
            """Return the text of messages in this template."""
            self._environment.start()
            # Templates test for tools or documents with `is none`, so both are always defined.
            return self._templates[name].render(
                **{
                    "documents": None,
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                }
            )

        # A template is a program, which may fail in any way.
        try:
            if all("content" in message for message in messages):
                return render(messages)
            with_content = [{"content": "", **message} for message in messages]
            try:
                text = render(messages)
            except Exception:
                return render(with_content)  # the template reads the content of every message
            # `message.get('content')` renders a message without content as the word None.
            if "None" in text:
                text_with_content = render(with_content)
                return (
                    text_with_content
                    if text_with_content.count("None") < text.count("None")
                    else text
                )
            return text
        except Exception as error:
            raise AlignerError(
                f"the model's chat template cannot render the messages: {error}"
            ) from error

    def _adapt_to_template(self, messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        """Return the messages with the role `developer` as `system` if the template does not know
        it, and with reasoning under the names that the template reads."""
        source = self._texts[name]
        adapted = []
        for original in messages:
            message = original
            if message.get("role") == "developer" and "developer" not in source:
                self._log_once(
                    logging.INFO,
                    "the chat template of %s does not know the role 'developer'; these messages are"
                    " rendered with the role 'system'",
                )
                message = {**message, "role": "system"}
            if (reasoning := message.get(REASONING_FIELDS[0])) is not None:
                fields = [field for field in REASONING_FIELDS if field in source]
                message = {**message, **dict.fromkeys(fields, reasoning)}
            adapted.append(message)
        return adapted

    def _sanitize(self, messages: Messages) -> Messages:
        """Return the messages with control tokens marked as plain characters, except in the
        assistant's messages."""
        if self._control_pattern is None:
            return messages
        sanitized = []
        for original in messages:
            message = original
            content = original.get("content")
            if message.get("role") != "assistant" and self._has_control_token(content):
                if self._sanitizes:
                    message = {**message, "content": self._escape(content)}
                else:
                    self._log_once(
                        logging.WARNING,
                        "messages contain control tokens of the model in %s, which are encoded as"
                        " control tokens; set data.sanitize=true to encode them as plain text",
                    )
            sanitized.append(message)
        return sanitized

    def _has_control_token(self, content: Any) -> bool:
        texts = _get_texts(content)
        return self._control_pattern is not None and any(map(self._control_pattern.search, texts))

    def _escape(self, content: Any) -> Any:
        """Return the content of a message, a text or a list of parts, with escaped texts."""
        assert self._control_pattern is not None
        if isinstance(content, str):
            return escape(content, self._control_pattern)
        if isinstance(content, list):
            return [self._escape(part) for part in content]
        if isinstance(content, dict) and isinstance(content.get("text"), str):
            return {**content, "text": escape(content["text"], self._control_pattern)}
        return content

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise AlignerError for a reserved variable; log variables that no template reads."""
        if reserved := _RESERVED_VARIABLES & variables.keys():
            raise AlignerError(
                f"chat_template_kwargs: {sorted(reserved)[0]!r} is set by aligner; remove it"
            )
        for name in variables:
            if not any(name in text for text in self._texts.values()):
                self._log_once(
                    logging.WARNING,
                    f"the chat template of %s does not read the variable {name!r} of"
                    " chat_template_kwargs",
                )

    def _check_losses(
        self,
        name: str,
        messages: Messages,
        tools: Tools | None,
        variables: Mapping[str, Any],
        learned_turns: LearnedTurns,
    ) -> None:
        """Check that the template drops no content of the messages.

        The check renders the messages with marker texts in place of their content: the template
        drops a content if its marker does not appear in the result. Conversations with the same
        roles and fields are rendered alike, so each such form is checked once.

        Raises:
            AlignerError: A role is dropped. All other losses are logged once.
        """
        text_form = _get_text_form(name, messages, tools, variables, learned_turns)
        if text_form in self._checked_texts:
            return
        probe, markers = _build_probe(messages, tools, learned_turns)
        form = json.dumps([name, probe, sorted(variables.items())], default=str)
        if form not in self._losses:
            probe_tools = None if tools is None else [_PROBE_TOOL]
            try:
                text = self._render_template(name, probe, probe_tools, False, variables)
            except AlignerError:
                # The template validates the texts and rejects markers, so it cannot be checked.
                self._losses[form] = []
            else:
                # Some templates change the case, for example of roles.
                self._losses[form] = [
                    loss for marker, loss in markers.items() if marker.lower() not in text.lower()
                ]
                for role in self._find_unknown_roles(name, probe, probe_tools, variables, text):
                    prefix = "" if role in STANDARD_ROLES else _ERROR_PREFIX
                    self._losses[form].append(f"{prefix}role {role!r}")

        for loss in self._losses[form]:
            if loss.startswith(_ERROR_PREFIX):
                raise AlignerError(
                    f"the chat template of {self._directory} does not render the"
                    f" {loss.removeprefix(_ERROR_PREFIX)}"
                )
            self._log_once(logging.WARNING, f"the chat template of %s does not render the {loss}")
        if text_form is not None and not self._losses[form]:
            self._checked_texts.add(text_form)

    def _find_unknown_roles(
        self,
        name: str,
        probe: list[dict[str, Any]],
        tools: Tools | None,
        variables: Mapping[str, Any],
        text: str,
    ) -> list[str]:
        """Return the roles that the template renders like the role of the user or the assistant,
        although it does not name them."""

        def is_rendered_as(role: str, other: str) -> bool:
            """Return whether the template renders messages of both roles as the same text."""
            renamed = [
                {**message, "role": other} if message.get("role") == role else message
                for message in probe
            ]
            try:
                return self._render_template(name, renamed, tools, False, variables) == text
            except AlignerError:
                return False

        roles = {str(message.get("role")) for message in probe} - {"user", "assistant"}
        return [
            role
            for role in sorted(roles)
            if role not in self._texts[name]
            and (is_rendered_as(role, "user") or is_rendered_as(role, "assistant"))
        ]

    def _log_once(self, level: int, message: str) -> None:
        if message not in self._logged_messages:
            self._logged_messages.add(message)
            _log.log(level, message, self._directory)


# Prefix of losses that are errors; all other losses are warnings.
_ERROR_PREFIX = "!"
_RESERVED_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt"))
_LEARNED_REASONING = "reasoning of the assistant's messages that are trained on"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "A tool",
        "parameters": {
            "type": "object",
            "properties": {"probeargument": {"type": "string", "description": "An argument"}},
            "required": ["probeargument"],
        },
    },
}


def _get_text_form(
    name: str,
    messages: Messages,
    tools: Tools | None,
    variables: Mapping[str, Any],
    learned_turns: LearnedTurns,
) -> tuple[Any, ...] | None:
    """Return what determines the probe of a conversation of texts (see `_build_probe`); None for
    other conversations. Building a probe takes much longer."""
    if tools is not None or variables:
        return None
    form: list[Any] = [name, learned_turns]
    for message in messages:
        content = message.get("content")
        if message.keys() != _TEXT_KEYS or not isinstance(content, str) or not content.strip():
            return None
        form.append(message["role"])
        form.append("</think>" in content)
    return tuple(form)


def _build_probe(
    messages: Messages, tools: Tools | None, learned_turns: LearnedTurns
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return messages of the same form with markers as texts, and the meaning of the markers.

    Returns:
        The messages, and for each marker a description of the content that the template drops if
        the marker does not appear in the rendered text.
    """
    probe: list[dict[str, Any]] = []
    markers = {} if tools is None else {"probetool": "tools"}
    for index, message in enumerate(messages):
        role = str(message.get("role"))
        is_learned = role == "assistant" and (
            learned_turns == "all" or (learned_turns == "last" and index == len(messages) - 1)
        )
        # All texts are replaced: messages of one form must not differ, for example in their ids.
        copy: dict[str, Any] = {
            key: f"probe{key}" if isinstance(entry, str) and key != "role" else entry
            for key, entry in message.items()
        }
        if "tool_call_id" in copy:
            # Mistral's templates require nine alphanumeric characters.
            copy["tool_call_id"] = "abcdefghi"
        texts = _get_texts(message.get("content"))
        if any(text.strip() for text in texts):
            marker = f"probecontent{index}end"
            content = marker
            # Reasoning may be a part of the content.
            if role == "assistant" and any("</think>" in text for text in texts):
                reasoning = f"probethought{index}end"
                content = f"<think>\n{reasoning}\n</think>\n\n{marker}"
                if is_learned:
                    markers[reasoning] = _LEARNED_REASONING
            is_list = isinstance(message["content"], list)
            copy["content"] = [{"type": "text", "text": content}] if is_list else content
            markers[marker] = f"content of messages with role {role!r}"
        elif "content" in message:
            copy["content"] = message["content"]
        if message.get("tool_calls"):
            copy["tool_calls"] = []
            for call_index in range(len(message["tool_calls"])):
                name = f"probecall{index}at{call_index}end"
                argument = f"probevalue{index}at{call_index}end"
                copy["tool_calls"].append(
                    {
                        "id": "abcdefghi",
                        "type": "function",
                        "function": {"name": name, "arguments": {"probeargument": argument}},
                    }
                )
                markers |= {name: "names of tool calls", argument: "arguments of tool calls"}
        if any(message.get(field) for field in REASONING_FIELDS):
            marker = f"probereasoning{index}end"
            copy |= {field: marker for field in REASONING_FIELDS if field in message}
            if is_learned:
                markers[marker] = _LEARNED_REASONING
        if role not in STANDARD_ROLES and role != "developer":
            markers[role] = f"{_ERROR_PREFIX}role {role!r}"
        probe.append(copy)
    return probe, markers


def _get_texts(content: Any) -> list[str]:
    """Return the texts in the content of a message."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text for part in content for text in _get_texts(part)]
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return [content["text"]]
    return []


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter also escapes characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _parse_date(text: str | None) -> datetime:
    return datetime.now() if text is None else datetime.fromisoformat(text)


def _raise_exception(message: str) -> NoReturn:
    """Raise an error; templates call this as `raise_exception`."""
    raise jinja2.TemplateError(message)


# Messages that no template contains, so that their texts can be found in the rendered text.
_QUESTION = "What is 1+1?"
_ANSWER = "It is certainly 2"


def find_end_of_turn(template: ChatTemplate, tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the token that a template puts after an assistant's message.

    The result is None if the template puts text there that is not an added token of the tokenizer,
    or if it rejects a conversation of one question and its answer.
    """
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER},
    ]
    try:
        text = template.render(messages, add_generation_prompt=False)
    except AlignerError:
        return None
    _, answer, after = text.rpartition(_ANSWER)
    if not answer:
        return None
    added_tokens = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    matches = [token for token in added_tokens if after.lstrip().startswith(token)]
    return added_tokens[max(matches, key=len)] if matches else None


class _Generation(Extension):
    """Put `_GENERATION_MARKERS` around the text of `{% generation %}…{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        start, end = (nodes.Output([nodes.TemplateData(marker)]) for marker in _GENERATION_MARKERS)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Variables that the block sets are local to it, as in the call block of transformers.
        return [start, nodes.Scope(body), end]
