"""Prompts and responses of records: plain texts, or chat messages in the words of the model's chat template.

Plain texts are taken as they are. Messages are a list of `{"role": …, "content": …}`; what a response is then, its
end-of-turn marker included, is what the template adds to the prompt once it is answered. Of a conversation of several
turns only the last answer is learned from; the earlier ones are part of the prompt.
"""

from __future__ import annotations

from typing import Any

from aligner.data.records import BadRecord, Record
from aligner.data.tokenizer import Tokenizer
from aligner.errors import AlignerError, ConfigError

_ASSISTANT = "assistant"


def prompt_text(record: Record, tokenizer: Tokenizer) -> str:
    """A record's `prompt`, a text or messages, or else its `messages`; an assistant's message at the end is left out.

    Raises BadRecord for a record that has none or an empty one, ConfigError for messages where the model has no template.
    """
    name = "messages" if "prompt" not in record.values and "messages" in record.values else "prompt"
    if name == "prompt" and not isinstance(record.values.get(name), list):
        return record.text(name)
    messages = _messages(record, name)
    if messages[-1]["role"] == _ASSISTANT:
        messages = messages[:-1]
    return _prompt(record, name, messages, tokenizer)


def exchange(record: Record, answer: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """The prompt's and the response's text; `answer` is the response's field.

    The response is a text or one assistant's message to the `prompt`, or the end of a whole conversation, for which
    `messages` is another name of `response`. Raises as `prompt_text` does.
    """
    name = "messages" if answer == "response" and answer not in record.values and "messages" in record.values else answer
    prompt, response = record.values.get("prompt"), record.values.get(name)
    if not isinstance(prompt, list) and not isinstance(response, list):
        return record.text("prompt"), record.text(name)
    asked_first = _messages(record, "prompt") if isinstance(prompt, list) else []
    last = _messages(record, name) if isinstance(response, list) else [{"role": _ASSISTANT, "content": record.text(name)}]
    said = [*asked_first, *last]
    if said[-1]["role"] != _ASSISTANT:
        raise BadRecord(f"{record.origin}: {name}: the last message is of the {said[-1]['role']}, must be of the {_ASSISTANT}")
    if not said[-1]["content"].strip():
        raise BadRecord(f"{record.origin}: the {answer} is empty")
    asked = _prompt(record, name, said[:-1], tokenizer)
    answered = _rendered(record, name, said, tokenizer, add_generation_prompt=False)
    if not answered.startswith(asked):
        raise BadRecord(
            f"{record.origin}: {name}: the model's chat template words the prompt differently once it is answered, so that no"
            " response can be told from it; give plain text"
        )
    return asked, answered[len(asked) :]


def _messages(record: Record, name: str) -> list[dict[str, Any]]:
    messages = record.items(name)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadRecord(f"{record.origin}: {name}[{index}]: a message needs a `role` and a `content`, both texts")
    return messages


def _prompt(record: Record, name: str, messages: list[dict[str, Any]], tokenizer: Tokenizer) -> str:
    if not messages or messages[-1]["role"] == _ASSISTANT:
        raise BadRecord(f"{record.origin}: {name}: the {_ASSISTANT}'s last message answers none of another role")
    return _rendered(record, name, messages, tokenizer, add_generation_prompt=True)


def _rendered(
    record: Record, name: str, messages: list[dict[str, Any]], tokenizer: Tokenizer, *, add_generation_prompt: bool
) -> str:
    try:
        return tokenizer.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
    except ConfigError:
        raise
    except AlignerError as error:
        raise BadRecord(f"{record.origin}: {name}: {error}") from error
