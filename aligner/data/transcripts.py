"""What was said in episodes that were sampled: as texts by turns, and as chat messages."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from aligner.data.chat_turns import ChatTurns
from aligner.data.tokenizer import Messages, Tokenizer
from aligner.data.tool_calls import ToolFormat, parse_turn
from aligner.data.types import Prompt, Sample
from aligner.errors import AlignerError


def response_text(sample: Sample, tokenizer: Tokenizer) -> str:
    """Return the text of a sample's response as it stands behind the prompt."""
    return tokenizer.decode_after(sample.tokens[: sample.prompt_length], sample.response)


def turns_with_context(sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Return the turns of `Sample.turns`, each after all tokens before it, int64 [T] and [R]."""
    turns = sample.turns()
    ends = itertools.accumulate(map(len, turns), initial=sample.prompt_length)
    return [(sample.tokens[:end], turn) for end, turn in zip(ends, turns, strict=False)]


def transcript(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Its turns, each under who said it, `policy` or `environment`."""
    turns = [tokenizer.decode_after(before, turn) for before, turn in turns_with_context(sample)]
    return [{("policy", "environment")[at % 2]: text} for at, text in enumerate(turns) if text]


def branch_texts(sample: Sample, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """What was said in each of its branches, behind all that it read."""
    return [
        {
            "prompt": tokenizer.decode(branch.tokens[: branch.prompt_length]),
            "response": response_text(branch, tokenizer),
        }
        for branch in sample.branches
    ]


def spoken_messages(
    sample: Sample, prompt: Prompt, form: ToolFormat | None, tokenizer: Tokenizer
) -> list[Mapping[str, Any]]:
    """The prompt's messages and what its tokens say of the episode: the policy's turns with the
    tool calls in them, as `form` has these; and of the environment's the text that the policy was
    given, a chat template's words included.
    """
    said: list[Mapping[str, Any]] = [
        *prompt.metadata.get("messages", [{"role": "user", "content": prompt.text}])
    ]
    for at, (before, turn) in enumerate(turns_with_context(sample)):
        if at % 2 == 0 and len(turn):
            own = turn[:-1] if bool(tokenizer.ends(turn[-1:])) else turn
            text = tokenizer.decode_after(before, own, skip_special_tokens=False)
            said.append(parse_turn(text, form, len(said)).messages[0])
        elif len(turn):
            text = tokenizer.decode_after(before, turn)
            said.append({"role": "environment", "content": text})
    return said


def conversation(
    sample: Sample,
    prompt: Prompt,
    answers: Sequence[str | list[dict[str, str]]],
    tokenizer: Tokenizer,
    chat: Callable[[], ChatTurns],
) -> dict[str, Any]:
    """The `messages` of an episode, and the prompt's `tools` where it has any, as demonstrations
    are given.

    `answers` are what the environment said, before the first turn and after each. Where they are
    messages, so is the prompt, and a turn's tool calls are told apart by the model's `chat`; where
    they are texts the environment is the user, as who wrote the prompt is. What was said in
    branches comes in its place.
    """
    if any(isinstance(answer, list) and answer for answer in answers):
        return _of_chat(
            sample,
            prompt.metadata,
            [answer for answer in answers if isinstance(answer, list)],
            tokenizer,
            chat(),
        )
    said = [("user", prompt.text)]
    for turn in transcript(sample, tokenizer):
        [(who, text)] = turn.items()
        role = {"policy": "assistant", "environment": "user"}[who]
        said[-1:] = (
            [(role, said[-1][1] + text)] if said[-1][0] == role else [said[-1], (role, text)]
        )
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def _of_chat(
    sample: Sample,
    asked: Mapping[str, Any],
    answers: Sequence[Messages],
    tokenizer: Tokenizer,
    chat: ChatTurns,
) -> dict[str, Any]:
    said, tools = [*asked["messages"]], asked.get("tools")
    variables = asked.get("chat_template_kwargs")
    turns = [
        (before, turn)
        for sequence in sample.sequences
        for before, turn in turns_with_context(sequence)[::2]
        if len(turn)
    ]
    for place, (before, turn) in enumerate(turns):
        said.append(_said(chat, said, tools, variables, before, turn, tokenizer))
        if place < len(turns) - 1:
            said += answers[place + 1]
    return {
        "messages": said,
        **({} if tools is None else {"tools": tools}),
        **({"chat_template_kwargs": variables} if variables else {}),
    }


def _said(
    chat: ChatTurns,
    messages: Messages,
    tools: Any,
    variables: Any,
    before: Tensor,
    turn: Tensor,
    tokenizer: Tokenizer,
) -> Mapping[str, Any]:
    try:
        return chat.said(chat.begin(messages, tools, variables), turn).messages[0]
    except AlignerError:  # it was cut
        return {"role": "assistant", "content": tokenizer.decode_after(before, turn)}
