"""What a person should know about the end-of-sequence tokens of a model; imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from aligner.data.chat_template import ChatTemplate, end_of_turn
from aligner.data.tokenizer_files import TokenizerFiles, has_chat_template, read_tokenizer_files


def describe_end_tokens(ids: Sequence[int], files: TokenizerFiles) -> str:
    """Return the EOS ids with the texts of their tokens, as `aligner validate` prints them."""
    if not ids:
        return "EOS tokens: none; responses end only at their maximum length"
    return "EOS tokens: " + ", ".join(_shown(id, files) for id in ids)


def end_token_warnings(directory: Path, ids: Sequence[int], files: TokenizerFiles) -> list[str]:
    """Return warnings about tokens that end a text but are not EOS tokens of the model.

    Args:
        directory: The model directory.
        ids: The EOS ids of its config.json and generation_config.json.
        files: Its tokenizer.

    Raises:
        ConfigError: The chat template is not valid.
    """
    warnings = []
    turn_end = None
    if has_chat_template(directory):
        turn_end = end_of_turn(ChatTemplate(directory), files.tokenizer)
    listed = ", ".join(_shown(id, files) for id in ids) or "none"
    if turn_end is not None and turn_end not in ids:
        warnings.append(
            f"{directory}: the chat template ends an assistant's message with the token"
            f" {_shown(turn_end, files)}, which is not an EOS token ({listed}), so generation does"
            f" not stop at it; add {turn_end} to eos_token_id in generation_config.json"
        )

    text = files.special_tokens.get("eos_token")
    named = None if text is None else files.tokenizer.token_to_id(text)
    if named is not None and named not in ids and named != turn_end:
        warnings.append(
            f"{directory}: eos_token of the tokenizer is {_shown(named, files)}, which is not an"
            f" EOS token of the model ({listed}), so generation does not stop at it; add {named} to"
            " eos_token_id in generation_config.json, or correct eos_token in tokenizer_config.json"
        )
    return warnings


def report_end_tokens(directory: Path, ids: Sequence[int]) -> list[str]:
    """Return the lines about EOS tokens that `aligner validate` prints for a model directory.

    Raises ConfigError for a tokenizer or a chat template that cannot be read.
    """
    files = read_tokenizer_files(directory)
    warnings = end_token_warnings(directory, ids, files)
    return [describe_end_tokens(ids, files), *(f"warning: {warning}" for warning in warnings)]


def _shown(id: int, files: TokenizerFiles) -> str:
    """Return an id with the text of its token."""
    text = files.tokenizer.id_to_token(id)
    return f"{id} (no token of the tokenizer)" if text is None else f"{id} {text!r}"
