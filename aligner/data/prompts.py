"""Prompts from a file or the configuration, as an endless stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from aligner.config.schema import Data
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt
from aligner.errors import AlignerError, ConfigError


@dataclass(frozen=True)
class PromptText:
    """A prompt before it is tokenized."""

    text: str
    origin: str
    """Where it was read, for messages: FILE:LINE or data.prompts[INDEX]."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def load_prompts(data: Data) -> list[PromptText]:
    """The prompts of `data.path` (.jsonl, .txt) where it is given, else `data.prompts`, in their order.

    Raises ConfigError for none at all, an unreadable file or line, or an empty prompt, with its place.
    """
    if data.path is not None:
        return read_prompts(Path(data.path), "data.path=")
    if not data.prompts:
        raise ConfigError("data: no prompts; give data.path=FILE")
    return _none_empty(PromptText(text, f"data.prompts[{index}]") for index, text in enumerate(data.prompts))


def read_prompts(path: Path, key: str, kind: str | None = None) -> list[PromptText]:
    """The prompts of a file, or of standard input where the path is `-`, in their order.

    `kind` is jsonl or txt; where None, what the file's suffix says, and txt on standard input. `key` is what the file was
    given with, for messages. Raises ConfigError, as `load_prompts` does.
    """
    standard_input = str(path) == "-"
    kind = kind or ("txt" if standard_input else path.suffix.removeprefix("."))
    if kind not in _PARSERS:
        raise ConfigError(
            f"{key}{path}: unknown kind of file {path.suffix!r}; allowed: {', '.join(f'.{kind}' for kind in _PARSERS)}"
        )
    name = "standard input" if standard_input else str(path)
    try:
        content = sys.stdin.buffer.read() if standard_input else path.read_bytes()
        lines = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}{path} cannot be read: {error}") from error
    if lines == [""]:
        raise ConfigError(f"{key}{path}: the file is empty")
    return _none_empty(_PARSERS[kind](line, f"{name}:{number}") for number, line in enumerate(lines, start=1))


def _none_empty(prompts: Iterable[PromptText]) -> list[PromptText]:
    checked = []
    for prompt in prompts:
        if not prompt.text.strip():
            raise ConfigError(f"{prompt.origin}: the prompt is empty")
        checked.append(prompt)
    return checked


def _parse_json_line(line: str, origin: str) -> PromptText:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{origin}: not a JSON object: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{origin}: not a JSON object but {type(record).__name__}")
    if not isinstance(record.get("prompt"), str):
        raise ConfigError(f"{origin}: needs a `prompt` key with a text; it has {', '.join(record) or 'no keys'}")
    return PromptText(record.pop("prompt"), origin, record)


_PARSERS: Mapping[str, Callable[[str, str], PromptText]] = {"jsonl": _parse_json_line, "txt": PromptText}


class PromptStream:
    """An endless stream of prompts: one pass over them after another, each in an order of its own when shuffled.

    What it yields is a pure function of (prompts, seed, position), so a resumed run needs no state but its step.
    """

    def __init__(
        self, prompts: Sequence[PromptText], tokenizer: Tokenizer, *, seed: int, shuffle: bool, max_prompt_tokens: int
    ) -> None:
        """Tokenize all prompts; ConfigError for one that cannot be tokenized or has more than `max_prompt_tokens`."""
        if not prompts:
            raise ConfigError("there are no prompts")
        allowed = f"data.max_prompt_tokens={max_prompt_tokens}"
        self._prompts = [(prompt, tokenize(prompt, tokenizer, max_prompt_tokens, allowed)) for prompt in prompts]
        self._seed = seed
        self._shuffle = shuffle

    def take(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts at positions step*count and up; a prompt's id is its position."""
        size = len(self._prompts)
        positions = range(step * count, (step + 1) * count)
        orders = {number: self._order(number) for number in {position // size for position in positions}}
        return [self._prompt(position, int(orders[position // size][position % size])) for position in positions]

    def _order(self, number: int) -> np.ndarray:
        """int64 [N]: which prompt comes when in a pass."""
        if not self._shuffle:
            return np.arange(len(self._prompts))
        bits = np.random.Philox(np.random.SeedSequence([self._seed, number]))
        return np.random.Generator(bits).permutation(len(self._prompts))

    def _prompt(self, position: int, index: int) -> Prompt:
        prompt, tokens = self._prompts[index]
        return Prompt(id=position, text=prompt.text, tokens=tokens, metadata=prompt.metadata)


def tokenize(prompt: PromptText, tokenizer: Tokenizer, limit: int, allowed: str) -> Tensor:
    """int64 [P], at least one token and at most `limit`, which messages call `allowed`; ConfigError for what is not so."""
    try:
        tokens = tokenizer.encode(prompt.text)
    except AlignerError as error:
        raise ConfigError(f"{prompt.origin}: {error}") from error
    if not 1 <= tokens.numel() <= limit:
        shown = prompt.text if len(prompt.text) <= 80 else prompt.text[:77] + "..."
        raise ConfigError(f"{prompt.origin}: the prompt has {tokens.numel()} tokens, allowed: 1 to {allowed}: {shown!r}")
    return tokens
