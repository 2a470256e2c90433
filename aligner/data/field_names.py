"""Choose the record fields of published data formats that stand for `prompt`, `response` and
`answer`, without losing a part of the prompt."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aligner.errors import ConfigError

_PROMPTS = ("question", "query", "instruction", "problem", "input", "text")
_SOLUTIONS = (
    "solution",
    "output",
    "completion",
    "generation",
    "generated_solution",
    "long_answer",
    "answer",
)
"""Fields for `response`: a full solution comes before a short answer."""
_ANSWERS = (
    "reward_model.ground_truth",
    "ground_truth",
    "expected_answer",
    "final_answer",
    "solution",
    "output",
)
"""Fields for `answer`: a short answer comes before a full solution."""
_COMPANIONS = ("input", "context", "passage", "document", "article", "paragraph")
"""Texts that belong to the prompt: a blank line joins them to it."""
_UNJOINED = (
    "system",
    "system_prompt",
    "system_message",
    "choices",
    "options",
    "endings",
    "candidates",
    "history",
    "contexts",
    "ctxs",
    "documents",
    "passages",
    "paragraphs",
    "evidence",
    "hint",
    "premise",
    "story",
    "schema",
    "table",
    "starter_code",
    "examples",
    "few_shot",
)
"""Fields that belong to the prompt, and that no template can join to it in the right form."""
_LETTERED = re.compile(r"[A-E]|(?:op|opt|option|choice|ending|sol|distractor)[ _]?(?:[A-Ea-e]|\d)")
"""Fields with one choice each of a multiple-choice question, such as `A`, `option_a` or `opa`."""
_MEDIA = ("image", "images", "audio", "video", "videos")
_EXPLICIT = ("prompt", "messages", "chosen", "rejected")
"""Fields that contain the prompt under aligner's own names."""
_LABELS = ("role", "type")
"""Entries of a message that no prompt contains as they are."""
_TRAINERS_WITH_RESPONSE = ("sft", "teacher_scores")


class FieldsNotChosen(ConfigError):
    """The record fields cannot be chosen without losing a part of the prompt."""


@dataclass(frozen=True)
class FieldChoice:
    """The fields chosen for a file of records."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """aligner's field names to field names of the data, or to templates of these"""
    notices: tuple[str, ...] = ()
    """fields that look like a part of the prompt and are not used"""


def choose_fields(
    records: Sequence[Mapping[str, Any]],
    trainer: str,
    *,
    generates: bool,
    reads_answer: bool = True,
) -> FieldChoice:
    """Choose the fields of records without `data.fields`.

    Args:
        records: some records of the data, at least one; the first decides on the names.
        trainer: `algorithm.trainer`.
        generates: whether the run generates responses.
        reads_answer: whether the reward is a function that compares with `answer`. Other rewards
            may read a field under its own name.

    Raises:
        FieldsNotChosen: a field that looks like a part of the prompt cannot be joined to it.
    """
    first = records[0]
    learns_response = trainer in _TRAINERS_WITH_RESPONSE
    fields: dict[str, str] = {}
    chosen_prompt = None

    if "prompt" not in first and "messages" not in first and (generates or learns_response):
        chosen_prompt = _first_present(first, _PROMPTS)
        if chosen_prompt is not None:
            taken = _companions(records, chosen_prompt)
            fields["prompt"] = _joined([chosen_prompt, *taken]) if taken else chosen_prompt
            _require_joined(records, [chosen_prompt, *taken], fields["prompt"])
    if learns_response and "response" not in first and "messages" not in first:
        # Some records may have only a short answer; they are reported where they are read.
        response = next(
            (name for name in _SOLUTIONS if any(has_content(each.get(name)) for each in records)),
            None,
        )
        if response is not None:
            fields["response"] = response
    if generates and reads_answer:
        answer = "answer" if "answer" in first else _first_present(first, _ANSWERS)
        if answer is not None:
            _require_one_answer(records, answer)
            is_list = any(isinstance(each.get(answer), list) for each in records)
            if answer != "answer" or is_list:
                fields["answer"] = answer

    notices = () if chosen_prompt is not None else tuple(_unused(records))
    return FieldChoice(fields, notices)


def _first_present(record: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if field_value(record, name) is not None), None)


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """Return a field's value, or that of an entry of a field with an object, such as
    `reward_model.ground_truth`; None if there is none."""
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _joined(names: Sequence[str]) -> str:
    first, *rest = names
    return "".join([f"{{{first}}}", *(f"\n\n{{{name}?}}" for name in rest)])


def _companions(records: Sequence[Mapping[str, Any]], prompt: str) -> list[str]:
    """Return the names of text fields that belong to the prompt in any of the records."""
    return [
        name
        for name in _COMPANIONS
        if name != prompt
        and any(isinstance(record.get(name), str) and record[name].strip() for record in records)
    ]


def is_prompt_part(name: str) -> bool:
    """Return whether a field looks like a part of the prompt by its name."""
    is_lettered = _LETTERED.fullmatch(name) is not None
    return is_lettered or name in (*_UNJOINED, *_COMPANIONS, *_MEDIA, *_PROMPTS)


def has_content(value: Any) -> bool:
    """Return whether a field's value contains any text or number."""
    return next(_texts(value), None) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or not has_content(value)


def _lost_fields(records: Sequence[Mapping[str, Any]], used: Sequence[str]) -> Iterator[str]:
    """Yield the names of fields that look like a part of the prompt, and whose text is not in the
    used fields already."""
    names = dict.fromkeys(name for record in records for name in record if is_prompt_part(name))
    for name in names:
        if name not in used and any(_is_lost(record, name, used) for record in records):
            yield name


def _is_lost(record: Mapping[str, Any], name: str, used: Sequence[str]) -> bool:
    texts = list(_texts(record.get(name)))
    prompt = [text for key in used for text in _texts(record.get(key))]
    if all(_contains("\n".join(prompt), text) for text in texts):
        return False
    # Alpaca's `text` repeats the whole record.
    repeats = name in _PROMPTS and all(_contains("\n".join(texts), text) for text in prompt)
    return not repeats


def _contains(prompt: str, text: str) -> bool:
    """Return whether a prompt contains a text, not as a part of another word or number."""
    return re.search(rf"(?<!\w){re.escape(text.strip())}(?!\w)", prompt) is not None


def _texts(value: Any) -> Iterator[str]:
    """Yield all non-empty texts and the numbers in a field's value."""
    if isinstance(value, str) and value.strip():
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            if name not in _LABELS:
                yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def _require_joined(
    records: Sequence[Mapping[str, Any]], used: Sequence[str], template: str
) -> None:
    not_text = [name for name in used[1:] if not all(_is_text(each.get(name)) for each in records)]
    for name in (*not_text, *_lost_fields(records, used)):
        if name in _MEDIA:
            raise FieldsNotChosen(
                f"data.fields: the record field `{name}` looks like a part of the prompt, but only"
                " text is supported; remove the field if the prompt is complete without it"
            )
        if name in not_text or (name in _COMPANIONS and name not in _PROMPTS):
            # Companions that are no texts, such as lists of passages, cannot be joined.
            raise FieldsNotChosen(
                f"data.fields: the record field `{name}` looks like a part of the prompt, but is"
                " not a text in every record; set data.fields with a template for the prompt, or"
                f" remove field `{name}`"
            )
        raise FieldsNotChosen(
            f"data.fields: the record field `{name}` looks like a part of the prompt, and is"
            " not joined to it automatically; set the prompt yourself, for example"
            f" data.fields={{prompt: '{_shown(template)}\\n\\n{{{name}}}'}}, or use `messages`,"
            f" or remove field `{name}`"
        )


def _require_one_answer(records: Sequence[Mapping[str, Any]], name: str) -> None:
    for record in records:
        value = field_value(record, name)
        if isinstance(value, list) and len(value) != 1:
            raise FieldsNotChosen(
                f"data.fields: the record field `{name}` is a list of {len(value)} answers, but the"
                " reward compares with one answer; store one answer, or set data.fields yourself"
                " for a reward function that reads the list"
            )


def _shown(template: str) -> str:
    return template.replace("\n", "\\n") if "{" in template else f"{{{template}}}"


def _unused(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for name in _lost_fields(records, _EXPLICIT):
        yield (
            f"the record field `{name}` looks like a part of the prompt, but the prompt does not"
            " contain it; set data.fields with a template for the prompt if it belongs there"
        )
