"""Grammars of responses that agents request: JSON in a given format, and tool calls.

A request constrains the response with `response_format` (or `guided_json`), `tool_choice` and
`parallel_tool_calls`. `build_request_grammar` reads these fields, and `build_response_grammar`
writes them as one grammar, in the format in which the model's chat template writes tool calls.
Reasoning before the response is free.

The grammars are texts in llguidance's dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aligner.agents.protocols.requests import ChatRequest, ModelRequest, NamedTool
from aligner.data.chat_turns import ChatTurns
from aligner.data.grammars import check_grammar, check_json_schema
from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import THINK_END, THINK_START, ToolFormat
from aligner.data.types import Grammar
from aligner.errors import AlignerError

Reasoning = Literal["none", "optional", "begun"]
"""Whether a response has reasoning before its content: `begun` means that the prompt ends inside
reasoning, `optional` that the model may begin with `<think>`."""

# Texts with which calls begin. The format llama3 may omit it.
_CALL_MARKERS: Mapping[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}
_WHITESPACE = r"WS: /[ \t\r\n]+/"


@dataclass(frozen=True)
class CallRules:
    """Tool calls that a response may have."""

    tools: Sequence[Mapping[str, Any]]
    """Tools that the response may call, in OpenAI's format."""
    is_required: bool
    """Whether the response consists of calls; otherwise it may be text, too."""
    is_parallel: bool
    """Whether the response may have several calls."""


def build_request_grammar(
    request: ModelRequest,
    prompt: str | None,
    tokenizer: Tokenizer,
    get_chat: Callable[[], ChatTurns],
) -> str | None:
    """Return the grammar that a request requires of its answers; None if it requires none.

    Args:
        request: The request.
        prompt: The rendered conversation of the request, with the generation prompt; None if the
            model has no chat template.
        tokenizer: The model's tokenizer.
        get_chat: Function that returns the chat template with its format of tool calls.

    Raises:
        AlignerError: A schema is invalid or cannot be satisfied, or the model does not support the
            required tool calls.
    """
    if not isinstance(request, ChatRequest) or not request.is_constrained:
        return None
    schema = None
    if request.response_format is not None:
        schema = request.response_format.schema
        # JSON mode without a schema: any object
        schema = {"type": "object"} if schema is None else schema
    calls = _build_call_rules(request)
    if request.continue_final_message:
        raise AlignerError(
            "messages: an answer that continues the last message cannot have a required format;"
            " leave out response_format, tool_choice and parallel_tool_calls, or"
            " continue_final_message"
        )
    if request.top_logprobs:
        raise AlignerError(
            f"top_logprobs={request.top_logprobs}: must be 0 for an answer with a required format"
            " (response_format, tool_choice or parallel_tool_calls), because the log-probs of"
            " alternatives do not follow the format"
        )
    if request.ignore_eos:
        raise AlignerError(
            "ignore_eos: must be false, because only an end-of-sequence token ends an answer with a"
            " required format"
        )

    tool_format = None if calls is None else get_chat().tool_format
    # a model that cannot call tools answers with text, unless calls are required
    if calls is not None and tool_format is None and not calls.is_required:
        if schema is None:
            return None
        calls = None
    grammar = build_response_grammar(
        tokenizer,
        schema=schema,
        calls=calls,
        tool_format=tool_format,
        reasoning="none" if prompt is None else detect_reasoning(tokenizer, prompt),
    )
    check_grammar(tokenizer.grammar_vocabulary, Grammar(grammar, tokenizer.eos_token_ids))
    return grammar


def _build_call_rules(request: ChatRequest) -> CallRules | None:
    """Return the tool calls that the answer to a request may have; None if it may have none.

    Raises:
        AlignerError: `tool_choice` requires a call of a tool that the request does not have.
    """
    choice = request.tool_choice
    if choice == "none":
        return None
    tools = request.tools
    if isinstance(choice, NamedTool):
        names = [tool.get("function", {}).get("name") for tool in tools]
        tools = tuple(tool for tool, name in zip(tools, names, strict=True) if name == choice.name)
        if not tools:
            raise AlignerError(
                f"tool_choice: names the tool {choice.name!r}; must be one of the tools of the"
                f" request: {', '.join(map(str, names)) or 'it has none'}"
            )
    if not tools:
        if choice == "required":
            raise AlignerError("tool_choice=required: the request has no tools")
        return None
    is_required = choice == "required" or isinstance(choice, NamedTool)
    return CallRules(tools, is_required=is_required, is_parallel=request.parallel_tool_calls)


def build_response_grammar(
    tokenizer: Tokenizer,
    *,
    schema: Mapping[str, Any] | None,
    calls: CallRules | None,
    tool_format: ToolFormat | None,
    reasoning: Reasoning,
) -> str:
    """Return the grammar of a response that has a JSON schema, or rules for its tool calls.

    Args:
        tokenizer: The model's tokenizer. Tags such as `<tool_call>` may be special tokens of its
            vocabulary, or plain text.
        schema: JSON schema of the content; None permits any text.
        calls: The tool calls that the response may have; None: the response has none.
        tool_format: The format in which the model writes tool calls; None if it writes none.
        reasoning: The reasoning before the response.

    Raises:
        AlignerError: A schema is invalid or cannot be satisfied, or the model's chat template
            writes no tool calls.
    """
    writer = _GrammarWriter(tokenizer)
    alternatives = []
    if calls is not None:
        if tool_format is None:
            raise AlignerError(
                "tool_choice: the model's chat template writes tool calls in no known format;"
                " must be auto or none, with parallel_tool_calls=true"
            )
        may_follow_text = not calls.is_required and schema is None
        alternatives.append(writer.add_calls(calls, tool_format, may_follow_text=may_follow_text))
    if calls is None or not calls.is_required:
        if schema is not None:
            check_json_schema(schema, "response_format.json_schema.schema")
            alternatives.append(writer.add_rule("content", f"%json {json.dumps(schema)}"))
        else:
            assert tool_format is not None
            alternatives.append(writer.add_text(tool_format))
    start = " | ".join(alternatives)

    # Reasoning is not part of the content, and a call inside it is not a call.
    if reasoning != "none":
        thought = writer.add_reasoning(has_begun=reasoning == "begun")
        start = f"{thought} ({start})"
    return writer.build(start)


def detect_reasoning(tokenizer: Tokenizer, prompt: str) -> Reasoning:
    """Return the reasoning of a response.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The conversation as the chat template renders it, with the generation prompt.
    """
    prompt_end = prompt.rstrip()
    if prompt_end.endswith(THINK_START):
        return "begun"
    # Templates close the reasoning in the generation prompt if it is disabled.
    if prompt_end.endswith(THINK_END) or not tokenizer.chat_template.mentions(THINK_END):
        return "none"
    return "optional"


class _GrammarWriter:
    """Collects the rules of a grammar. Methods that add rules return a reference to them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = [_WHITESPACE]

    def build(self, start: str) -> str:
        """Return the grammar of the texts that `start` describes."""
        return "\n".join([f"start: {start}", *self._rules])

    def add_rule(self, name: str, content: str) -> str:
        """Add a rule, and return its name."""
        self._rules.append(f"{name}: {content}")
        return name

    def add_reasoning(self, *, has_begun: bool) -> str:
        """Add the rules of reasoning, whose start may be part of the prompt."""
        if (end_token := self._find_special_token(THINK_END)) is not None:
            self._rules.append("THOUGHT: /(?s:.+)/")
            reasoning = f"THOUGHT? {end_token} WS?"
        else:
            # Without a special token, the reasoning ends with the first occurrence of the text.
            self._rules.append(f"thought[suffix={json.dumps(THINK_END)}]: /(?s:.*)/")
            reasoning = "thought WS?"
        return reasoning if has_begun else f"({self._write_tag(THINK_START)} {reasoning})?"

    def add_text(self, tool_format: ToolFormat) -> str:
        """Add the rules of a text that is not parsed as a call, which may be empty."""
        marker = _CALL_MARKERS[tool_format]
        is_excluded = self._find_special_token(marker) is None
        if tool_format == "llama3":
            # A JSON object alone would be a call.
            expression = r"/[ \t\r\n]*[^{ \t\r\n](?s:.*)/"
            if is_excluded:
                expression += r" & ~/[ \t\r\n]*<\|python_tag\|>(?s:.*)/"
        elif is_excluded:
            escaped = marker.replace("[", r"\[").replace("]", r"\]")
            expression = f"/(?s:.+)/ & ~/(?s:.*){escaped}(?s:.*)/"
        else:
            expression = "/(?s:.+)/"
        self._rules.append(f"TEXT: {expression}")
        return "TEXT?"

    def add_calls(self, calls: CallRules, tool_format: ToolFormat, *, may_follow_text: bool) -> str:
        """Add the rules of one or several calls.

        Args:
            calls: The calls.
            tool_format: The format of the calls.
            may_follow_text: Whether a text may be before the first call.
        """
        arguments_key = "parameters" if tool_format == "llama3" else "arguments"
        objects = [
            self._add_call_object(index, tool, arguments_key)
            for index, tool in enumerate(calls.tools)
        ]
        if tool_format == "mistral":
            # Mistral's templates write an id of nine characters into each call.
            objects = [f'{name} (WS? "," WS? "\\"id\\"" WS? ":" WS? CALL_ID)?' for name in objects]
            self._rules.append('CALL_ID: /"[a-zA-Z0-9]{9}"/')
        call_object = f'"{{" WS? ({" | ".join(objects)}) WS? "}}"'

        if tool_format == "hermes":
            end = self._write_tag("</tool_call>")
            first_end = f"WS? {call_object} WS? {end}"
            call = f"{self._write_tag(_CALL_MARKERS['hermes'])} {first_end}"
            self.add_rule("call", call)
            others = "(WS? call)*" if calls.is_parallel else ""
            if may_follow_text:
                return self._add_text_before(_CALL_MARKERS["hermes"], f"{first_end} {others}")
            return f"WS? call {others}"

        if tool_format == "mistral":
            self.add_rule("call", call_object)
            others = '(WS? "," WS? call)*' if calls.is_parallel else ""
            call_list = f'WS? "[" WS? call {others} WS? "]"'
            if may_follow_text:
                return self._add_text_before(_CALL_MARKERS["mistral"], call_list)
            return f"{self._write_tag(_CALL_MARKERS['mistral'])} {call_list}"

        self.add_rule("call", call_object)
        others = '(WS? ";" WS? call)*' if calls.is_parallel else ""
        return f"WS? ({self._write_tag(_CALL_MARKERS['llama3'])} WS?)? call {others}"

    def _add_text_before(self, marker: str, calls: str) -> str:
        """Add the rules of calls after a text that ends with the first marker of a call."""
        if (token := self._find_special_token(marker)) is not None:
            self._rules.append("TEXT_BEFORE: /(?s:.+)/")
            return f"TEXT_BEFORE? {token} {calls}"
        self._rules.append(f"text_before[suffix={json.dumps(marker)}]: /(?s:.*)/")
        return f"text_before {calls}"

    def _add_call_object(self, index: int, tool: Mapping[str, Any], arguments_key: str) -> str:
        """Add the rule of a call's name and arguments, without the braces around them."""
        function = tool["function"]
        name = function["name"]
        parameters = {"type": "object"} | dict(function.get("parameters") or {})
        check_json_schema(parameters, f"tools.{index}.function.parameters")
        arguments = self.add_rule(f"arguments_{index}", f"%json {json.dumps(parameters)}")
        # The name is a JSON string inside a string of the grammar.
        name_text = json.dumps(json.dumps(name))
        key_text = json.dumps(json.dumps(arguments_key))
        return self.add_rule(
            f"call_{index}",
            rf'"\"name\"" WS? ":" WS? {name_text} WS? "," WS? {key_text} WS? ":" WS? {arguments}',
        )

    def _write_tag(self, tag: str) -> str:
        """Return a reference to a tag: to its special token, or to its text."""
        return self._find_special_token(tag) or json.dumps(tag)

    def _find_special_token(self, tag: str) -> str | None:
        """Return a reference to a tag's special token; None if the tag is plain text.

        An added token that is not special is plain text for a grammar, which allows it wherever it
        allows its text.
        """
        token = self._tokenizer.find_special_token(tag)
        return None if token is None else f"<[{token}]>"
