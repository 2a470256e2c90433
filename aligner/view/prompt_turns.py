"""Turns of a rendered prompt: the messages that a chat template put into the prompt's text.

The sample files contain the messages of episodes. For all other prompts, the turns are found by the
markers of common chat templates.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from aligner.view.shown_text import MAX_TEXT_LENGTH, Turn, parse_turns, printable

USER = "user"
ASSISTANT = "assistant"
# Text before the first turn that is not a part of it, such as `<s>` or `<|begin_of_text|>`.
_BEGINNING = re.compile(r"\s*(?:\[gMASK\])?(?:<[^<>\s]{1,32}>)?\s*")


@dataclass(frozen=True)
class _ChatFormat:
    """Markers of a chat template."""

    header: re.Pattern[str]
    """The marker at the beginning of a turn; group 1 is the role."""
    ends: tuple[str, ...] = ()
    """Markers at the end of a turn."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles by the text of group 1; a text that is missing here is the role itself."""


_CHAT_FORMATS = (
    # ChatML: Qwen, SmolLM2, Yi and others
    _ChatFormat(re.compile(r"<\|im_start\|>(\w+)\n?"), ("<|im_end|>",)),
    # Llama 3
    _ChatFormat(
        re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>"), ("<|eot_id|>", "<|eom_id|>")
    ),
    # Llama 4
    _ChatFormat(re.compile(r"<\|header_start\|>(\w+)<\|header_end\|>"), ("<|eot|>", "<|eom|>")),
    # gpt-oss
    _ChatFormat(
        re.compile(r"<\|start\|>(\w+)(?:<\|channel\|>\w+)?(?:<\|message\|>)?"),
        ("<|end|>", "<|return|>", "<|call|>"),
    ),
    # Gemma
    _ChatFormat(
        re.compile(r"<start_of_turn>(\w+)\n?"), ("<end_of_turn>",), roles={"model": ASSISTANT}
    ),
    # Phi, Zephyr, GLM
    _ChatFormat(
        re.compile(r"<\|(system|user|assistant|tool|observation)\|>"),
        ("<|end|>", "</s>", "<|endoftext|>"),
    ),
    # DeepSeek
    _ChatFormat(
        re.compile("<\uff5c(begin▁of▁sentence|User|Assistant)\uff5c>"),
        ("<\uff5cend▁of▁sentence\uff5c>",),
        roles={"begin▁of▁sentence": "system", "User": USER, "Assistant": ASSISTANT},
    ),
    # Mistral, Llama 2
    _ChatFormat(
        re.compile(r"(\[/?INST\]|\[/?SYSTEM_PROMPT\]|<</?SYS>>)"),
        ("<s>", "</s>"),
        roles={
            "[SYSTEM_PROMPT]": "system",
            "[/SYSTEM_PROMPT]": USER,
            "[INST]": USER,
            "[/INST]": ASSISTANT,
            "<<SYS>>": "system",
            "<</SYS>>": USER,
        },
    ),
    # Plain dialogues, as in HH-RLHF
    _ChatFormat(
        re.compile(r"(?:^|\n\n)(System|Human|User|Assistant):"),
        roles={"System": "system", "Human": USER, "User": USER, "Assistant": ASSISTANT},
    ),
)


def split_prompt(prompt: str) -> list[tuple[str, str]]:
    """Return the role and the text of each turn of a rendered prompt.

    The last turn may be the beginning of the response: an assistant's turn that is empty or begins
    with text of the template, such as `<think>`. The result is empty if the prompt has no turns of
    a known chat template.
    """
    for chat_format in _CHAT_FORMATS:
        headers = list(chat_format.header.finditer(prompt))
        if headers and _BEGINNING.fullmatch(prompt, 0, headers[0].start()):
            return _split_at_headers(prompt, headers, chat_format)
    return []


def _split_at_headers(
    prompt: str, headers: list[re.Match[str]], chat_format: _ChatFormat
) -> list[tuple[str, str]]:
    ends = [*(header.start() for header in headers[1:]), len(prompt)]
    turns = []
    for header, end in zip(headers, ends, strict=True):
        text = prompt[header.end() : end].strip()
        for marker in chat_format.ends:
            text = text.removesuffix(marker).rstrip()
        is_last = header is headers[-1]
        # The opening `[INST]` of Llama 2 is followed directly by the marker of the system prompt.
        if text or is_last:
            turns.append((chat_format.roles.get(header[1], header[1]), text))
    return turns


def build_prompt_turns(prompt: str, messages: str | None = None) -> list[Turn]:
    """Return the turns of a prompt, without the response or its beginning; one turn of the role
    `prompt` if the prompt has no turns of a known chat template.

    Args:
        prompt: Text of the prompt.
        messages: Stored messages of the sample as JSON, if there are any.
    """
    if stored_turns := parse_turns(messages):
        last_question = max(
            (index for index, turn in enumerate(stored_turns) if turn.role == USER), default=-1
        )
        # The turns after the user's last message are the response.
        return stored_turns[: last_question + 1] or stored_turns[:1]
    turns = split_prompt(prompt)
    if turns and turns[-1][0] == ASSISTANT:
        turns = turns[:-1]
    return [Turn(role, printable(text)) for role, text in turns or [("prompt", prompt)]]


def build_sample_turns(prompt: str, response: str, messages: str | None) -> list[Turn]:
    """Return the turns of a sample: the stored messages, or the turns of the prompt followed by the
    response.

    Args:
        prompt: Text of the prompt.
        response: Text of the response.
        messages: Stored messages as JSON, if there are any.
    """
    if stored_turns := parse_turns(messages):
        return stored_turns
    prompt_turns = split_prompt(prompt)
    beginning = ""
    if prompt_turns and prompt_turns[-1][0] == ASSISTANT:
        # The template may have written the beginning of the response, such as `<think>`.
        beginning = prompt_turns[-1][1]
    answer = f"{beginning}\n{response}" if beginning else response
    return [*build_prompt_turns(prompt), Turn(ASSISTANT, printable(answer))]


def find_question(prompt: str, messages: str | None, limit: int = MAX_TEXT_LENGTH) -> str:
    """Return the last message of the user in a prompt; the whole prompt if it has no such message.

    Args:
        prompt: Text of the prompt.
        messages: Stored messages as JSON, if there are any.
        limit: Maximum length in characters.
    """
    turns = parse_turns(messages) or build_prompt_turns(prompt)
    questions = [turn.text for turn in turns if turn.role == USER and turn.text]
    return printable(questions[-1] if questions else prompt, limit)
