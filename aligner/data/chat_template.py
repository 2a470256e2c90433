"""Chat templates of a model directory: Jinja, rendered in a sandbox as transformers does."""

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
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aligner.data.control_tokens import control_pattern, escape
from aligner.data.tokenizer_files import read_chat_templates, read_special_tokens
from aligner.errors import AlignerError, ConfigError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field for the reasoning of an assistant's message; aligner uses the first."""
USUAL_ROLES = frozenset(("system", "user", "assistant", "tool"))


def normalized_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect.

    Entries with the value null are removed at any depth: `datasets` adds them to give all rows one
    schema, and OpenAI's clients send `content: null` next to tool calls. Arguments of tool calls
    that are JSON text, as on OpenAI's wire, become objects; nulls inside the text are values, and
    stay. A call without arguments has none (`{}`). The reasoning of a message is also available as
    `reasoning_content`.

    Raises:
        AlignerError: The arguments of a tool call are not the JSON text of an object.
    """
    return [_normalized(message, index) for index, message in enumerate(messages)]


def normalized_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of tools, which may be given as JSON text; None without tools.

    Raises:
        AlignerError: The value is not a list of JSON objects.
    """
    if isinstance(tools, str) and not tools.strip():
        return None
    tools = _decoded(tools, "tools")
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(each, Mapping) for each in tools):
        raise AlignerError("`tools` must be a list of JSON objects (tool schemas)")
    return [dict(tool) for tool in tools]


def normalized_variables(variables: Any) -> dict[str, Any]:
    """Return `chat_template_kwargs`, which may be given as JSON text; empty for None.

    Raises:
        AlignerError: The value is not a JSON object.
    """
    variables = _decoded(variables, "chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise AlignerError(
            f"`chat_template_kwargs` must be a JSON object, got {type(variables).__name__}"
        )
    return dict(variables)


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the entries of its objects that are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(entry) for entry in value]
    return value


def _decoded(value: Any, field: str) -> Any:
    """Return the JSON value of a field that may be given as text, in which nulls are values."""
    if not isinstance(value, str):
        return without_nulls(value)
    try:
        return json.loads(value)
    except ValueError as error:
        raise AlignerError(f"`{field}` is not valid JSON: {error}") from error


def _normalized(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    normal: dict[str, Any] = without_nulls(message)
    if not normal.get("tool_calls", True):
        del normal["tool_calls"]
    calls = normal.get("tool_calls")
    if isinstance(calls, list):
        normal["tool_calls"] = [
            _with_decoded_arguments(call, f"messages[{index}].tool_calls[{place}]")
            for place, call in enumerate(calls)
        ]
    reasoning = next((normal[name] for name in REASONING if normal.get(name)), None)
    if reasoning is not None:
        normal[REASONING[0]] = reasoning
    return normal


def _with_decoded_arguments(call: Any, where: str) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        inner = call["function"]
        return {**call, "function": _with_decoded_arguments(inner, f"{where}.function")}
    # Templates read the arguments of every call.
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        return {**call, "arguments": arguments}
    try:
        decoded = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise AlignerError(f"{where}.arguments: not valid JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise AlignerError(
            f"{where}.arguments: must be a JSON object, got {type(decoded).__name__}"
        )
    return {**call, "arguments": decoded}


_log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation, each with a `role` and a `content`, or `tool_calls`."""

Tools = Sequence[Mapping[str, Any]]
"""Functions that an assistant may call, described as JSON schemas."""

Learned = Literal["none", "last", "all"]
"""Messages of the assistant that are trained on."""

_MARKS = ("\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1")
"""What a template's text has, while it is rendered, where `{% generation %}` begins and ends: no
character of any text."""


class ChatTemplate:
    """The chat template of a model directory, rendered in a sandbox: `chat_template.jinja` where
    there is one.

    Else it is what `tokenizer_config.json` has under `chat_template`; of several templates the one
    called `default`, or for messages with tools, where there is one, `tool_use`.
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
            date: The date that `strftime_now` formats, in ISO 8601; None for the current date.
            variables: Further variables of the template (`chat_template_kwargs`).
            control_tokens: Texts of the tokenizer's control tokens.
            sanitizes: Whether control tokens in the text of user, system and tool messages are
                encoded as plain characters; otherwise a warning is logged.

        Raises:
            ConfigError: The directory has no chat template, or it is not valid Jinja.
        """
        self._directory = directory
        self._variables = normalized_variables(variables)
        self._control = control_pattern(list(control_tokens))
        self._sanitizes = sanitizes
        self._special_tokens = read_special_tokens(directory)
        texts = self._texts = read_chat_templates(directory)
        self._probed: dict[str, list[str]] = {}
        self._warned: set[str] = set()
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
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
        learned: Learned = "none",
    ) -> str:
        """Return the conversation as text; with a generation prompt it ends where the assistant is
        to answer.

        Messages and tools may have the forms that `normalized_messages` and `normalized_tools`
        accept. A control token in the text of a user, system or tool message is marked as plain
        characters (`aligner.data.control_tokens`).

        Args:
            variables: Further variables of the template, which take precedence over those of all
                conversations (`chat_template_kwargs`).
            learned: The assistant's messages that are trained on. A warning is logged if the
                template drops their reasoning.

        Raises:
            AlignerError: The template refuses the messages, or does not know the role of one.
        """
        parts = self.marked(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            learned=learned,
        )
        return "".join(parts)

    def marked(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
        learned: Learned = "none",
    ) -> list[str]:
        """Return the text in parts, of which every second, from the second on, is what
        `{% generation %}` marks as the assistant's.

        Raises as `render` does.
        """
        own = {**self._variables, **normalized_variables(variables)}
        self._check_variables(own)
        tools = normalized_tools(tools)
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        normal = self._with_known_roles(normalized_messages(messages), name)
        text = self._rendered(name, self._sanitized(normal), tools, add_generation_prompt, own)

        self._check_nothing_is_dropped(name, normal, tools, own, learned)
        return [part for marked in text.split(_MARKS[0]) for part in marked.split(_MARKS[1])]

    def _rendered(
        self,
        name: str,
        messages: Messages,
        tools: Tools | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        def render(given: Messages) -> str:
            # Templates ask whether there are tools or documents by comparing with none.
            return self._templates[name].render(
                **{
                    "documents": None,
                    **self._special_tokens,
                    **variables,
                    "messages": given,
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
                with_empty = render(with_content)
                return with_empty if with_empty.count("None") < text.count("None") else text
            return text
        except Exception as error:
            raise AlignerError(
                f"the model's chat template cannot render the messages: {error}"
            ) from error

    def _with_known_roles(self, messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
        """Return the messages, with the role `developer` as `system` if the template does not know
        it, and reasoning under the name that the template reads."""
        source = self._texts[name]
        renamed = []
        for original in messages:
            message = original
            if message.get("role") == "developer" and "developer" not in source:
                self._log_once(
                    logging.INFO,
                    "the chat template of %s does not know the role 'developer'; these messages are"
                    " rendered with the role 'system'",
                )
                message = {**message, "role": "system"}
            if (reasoning := message.get(REASONING[0])) is not None:
                names = [each for each in REASONING if each in source]
                message = {**message, **dict.fromkeys(names, reasoning)}
            renamed.append(message)
        return renamed

    def _sanitized(self, messages: Messages) -> Messages:
        """Return the messages with control tokens of texts that are not the assistant's marked as
        plain characters."""
        if self._control is None:
            return messages
        found = []
        for original in messages:
            message, content = original, original.get("content")
            if message.get("role") != "assistant" and self._has_control(content):
                if self._sanitizes:
                    message = {**message, "content": self._escaped(content)}
                else:
                    self._log_once(
                        logging.WARNING,
                        "messages contain control tokens of the model in %s, which are encoded as"
                        " control tokens; set data.sanitize=true to encode them as plain text",
                    )
            found.append(message)
        return found

    def _has_control(self, content: Any) -> bool:
        texts = _texts_of(content)
        return self._control is not None and any(map(self._control.search, texts))

    def _escaped(self, content: Any) -> Any:
        assert self._control is not None
        if isinstance(content, str):
            return escape(content, self._control)
        if isinstance(content, list):
            return [self._escaped(part) for part in content]
        if isinstance(content, dict) and isinstance(content.get("text"), str):
            return {**content, "text": escape(content["text"], self._control)}
        return content

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        if reserved := _RESERVED & variables.keys():
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

    def _check_nothing_is_dropped(
        self,
        name: str,
        messages: Messages,
        tools: Tools | None,
        variables: Mapping[str, Any],
        learned: Learned,
    ) -> None:
        """Compare a rendering of marker texts with the messages: what does not appear in it, the
        template drops.

        Conversations with the same roles and fields are rendered alike, so each such form is
        checked once.

        Raises:
            AlignerError: A role is dropped. All other losses are logged once.
        """
        probe, markers = _probe(messages, tools, learned)
        form = json.dumps([name, probe, sorted(variables.items())], default=str)
        if form not in self._probed:
            probe_tools = None if tools is None else [_PROBE_TOOL]
            try:
                text = self._rendered(name, probe, probe_tools, False, variables)
            except AlignerError:
                # The template looks into the texts, and refuses markers.
                self._probed[form] = []
            else:
                self._probed[form] = [
                    loss for marker, loss in markers.items() if marker.lower() not in text.lower()
                ]
                for role in self._unknown_roles(name, probe, probe_tools, variables, text):
                    kind = "" if role in USUAL_ROLES else _REFUSED
                    self._probed[form].append(f"{kind}role {role!r}")
        for loss in self._probed[form]:
            if loss.startswith(_REFUSED):
                raise AlignerError(
                    f"the chat template of {self._directory} does not render the"
                    f" {loss.removeprefix(_REFUSED)}"
                )
            self._log_once(logging.WARNING, f"the chat template of %s does not render the {loss}")

    def _unknown_roles(
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
            renamed = [
                {**message, "role": other} if message.get("role") == role else message
                for message in probe
            ]
            try:
                return self._rendered(name, renamed, tools, False, variables) == text
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
        if message not in self._warned:
            self._warned.add(message)
            _log.log(level, message, self._directory)


_REFUSED = "!"
_RESERVED = frozenset(("messages", "tools", "add_generation_prompt"))
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


def _probe(
    messages: Messages, tools: Tools | None, learned: Learned
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return messages of the same form whose texts are markers, and what is lost with each marker
    that does not appear in the rendered text."""
    probe: list[dict[str, Any]] = []
    markers = {} if tools is None else {"probetool": "tools"}
    for index, message in enumerate(messages):
        role = str(message.get("role"))
        is_learned = role == "assistant" and (
            learned == "all" or (learned == "last" and index == len(messages) - 1)
        )
        # All texts are replaced: messages of one form must not differ, for example in their ids.
        copy: dict[str, Any] = {
            key: f"probe{key}" if isinstance(entry, str) and key != "role" else entry
            for key, entry in message.items()
        }
        if "tool_call_id" in copy:
            copy["tool_call_id"] = "abcdefghi"
        texts = _texts_of(message.get("content"))
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
            for place in range(len(message["tool_calls"])):
                name = f"probecall{index}at{place}end"
                argument = f"probevalue{index}at{place}end"
                copy["tool_calls"].append(
                    {
                        "id": "abcdefghi",
                        "type": "function",
                        "function": {"name": name, "arguments": {"probeargument": argument}},
                    }
                )
                markers |= {name: "names of tool calls", argument: "arguments of tool calls"}
        if any(message.get(each) for each in REASONING):
            marker = f"probereasoning{index}end"
            copy |= {each: marker for each in REASONING if each in message}
            if is_learned:
                markers[marker] = _LEARNED_REASONING
        if role not in USUAL_ROLES and role != "developer":
            markers[role] = f"{_REFUSED}role {role!r}"
        probe.append(copy)
    return probe, markers


def _texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [text for part in content for text in _texts_of(part)]
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
