"""The reward's side of a world of ranks: requests to scores, whoever hosts it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from aligner.data.tokenizer import read_tokenizer
from aligner.models.model_source import model_directory, read_normalization
from aligner.rewards.normalizer import RewardNormalizer
from aligner.rewards.scorers import ScoringRequest
from aligner.rewards.sources import ModelSource, RewardSource, ScoringBatch, WeightedSum, text_source
from aligner.schema import Config, reward_sources
from aligner.servers.backend import ValueModel
from aligner.servers.commands import Handler, RowJoin, joined_by
from aligner.servers.host import Serve
from aligner.servers.protocol import REWARD_MODEL, EndpointSpec, RequestError
from aligner.servers.serving import Caller, model_limits, tensor
from aligner.servers.validation import Limits

BuildModel = Callable[[Path], ValueModel]
"""The reward model in a directory, on this rank."""


class Scoring:
    """One rank's side of the reward. Every rank of the world calls every handler."""

    def __init__(self, reward: WeightedSum, tokenizer: Tokenizer, limits: Limits) -> None:
        self._reward = reward
        self._tokenizer = tokenizer
        self.limits = limits
        """What the reward takes."""
        self._wants_tokens = any(isinstance(source, ModelSource) for _, source in reward.parts)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What each op does."""
        return {"score_tokens": self.score_tokens, "score_texts": self.score_texts}

    @joined_by(RowJoin(("metadata",)))
    def score_tokens(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, metadata: Sequence[str] | None = None
    ) -> Tensor:
        """Scores float32 [B] of tokens int64 [B, S], lengths and prompt lengths int64 [B], and B JSON objects."""

        @functools.cache
        def requests() -> list[ScoringRequest]:
            return _requests(self._decoded(tokens, lengths, prompt_lengths), metadata)

        return self._reward(ScoringBatch(requests, tokens, lengths))

    @joined_by(RowJoin(("texts", "metadata")))
    def score_texts(
        self,
        texts: Sequence[str],
        metadata: Sequence[str] | None = None,
        tokens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Scores float32 [B] of whole texts, which are the responses to nothing; their tokens where a model wants them."""
        return self._reward(ScoringBatch(lambda: _requests([("", text) for text in texts], metadata), tokens, lengths))

    def endpoints(self, call: Caller) -> Mapping[EndpointSpec, Serve]:
        """Rank 0's endpoint functions."""

        def rewards(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            arguments: dict[str, Any] = {"alone": "sequence_number" in arrays}
            if "metadata" in arrays:
                arguments["metadata"] = _metadata(arrays["metadata"])
            if "sentences" in arrays:
                texts = _texts(arrays["sentences"])
                tensors = self._encoded(texts) if self._wants_tokens else {}
                scores = call("score_texts", tensors, texts=texts, **arguments)
            else:
                scores = call("score_tokens", _token_tensors(arrays), **arguments)
            return {"rewards": scores.float().cpu().numpy()[:, None]}

        return {REWARD_MODEL: rewards}

    def _decoded(self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> list[tuple[str, str]]:
        """Prompt and response of each row, special tokens skipped."""
        rows = zip(tokens.tolist(), lengths.tolist(), prompt_lengths.tolist(), strict=True)
        halves = [half for row, length, prompt in rows for half in (row[:prompt], row[prompt:length])]
        texts = self._tokenizer.decode_batch(halves, skip_special_tokens=True)
        return list(zip(texts[::2], texts[1::2], strict=True))

    def _encoded(self, texts: Sequence[str]) -> dict[str, Tensor]:
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        lengths, longest = [len(row) for row in rows], self.limits.max_sequence_length
        if min(lengths) < 1 or max(lengths) > longest:
            raise RequestError(f"sentences: got {min(lengths)} to {max(lengths)} tokens, allowed: 1 to {longest}")
        largest = self.limits.vocab_size - 1
        for row, ids in enumerate(rows):
            if max(ids) > largest:
                raise RequestError(f"sentences: row {row} has token id {max(ids)}, allowed: 0 to {largest} (the model's ids)")
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
        return {"tokens": tokens, "lengths": torch.tensor(lengths)}


def build_scoring(config: Config, build_model: BuildModel) -> Scoring:
    """The reward that the configuration describes. Raises ConfigError when it cannot be had."""
    directory = model_directory(config)
    tokenizer = read_tokenizer(directory)
    limits = model_limits(config, directory, tokenizer.get_vocab_size())
    parts: list[tuple[reward_sources.Source, RewardSource]] = []
    for source in reward_sources.reward_sources(config.reward):
        if isinstance(source, reward_sources.ModelSource):
            model = build_model(Path(source.path))
            normalizer = RewardNormalizer(*read_normalization(Path(source.path)))
            parts.append((source, ModelSource(source.name, model, normalizer)))
            key = f"{source.key}.path"
            limits = narrower(limits, model_limits(config, Path(source.path), model.vocab_size, key))
        else:
            parts.append((source, text_source(source)))
    return Scoring(WeightedSum(parts), tokenizer, limits)


def narrower(limits: Limits, others: Limits) -> Limits:
    """What both models take."""
    return dataclasses.replace(
        limits,
        vocab_size=min(limits.vocab_size, others.vocab_size),
        max_sequence_length=min(limits.max_sequence_length, others.max_sequence_length),
    )


def _requests(parts: Sequence[tuple[str, str]], metadata: Sequence[str] | None) -> list[ScoringRequest]:
    fields = [{}] * len(parts) if metadata is None else [_json_object(row, text) for row, text in enumerate(metadata)]
    return [ScoringRequest(prompt, response, about) for (prompt, response), about in zip(parts, fields, strict=True)]


def _metadata(column: NDArray) -> list[str]:
    """The JSON texts of a `metadata` tensor [B, 1], each checked to be an object."""
    texts = _texts(column, "metadata")
    for row, text in enumerate(texts):
        _json_object(row, text)
    return texts


def _json_object(row: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"metadata: row {row} is not JSON ({error}), allowed: a JSON object a row") from error
    if not isinstance(value, dict):
        raise RequestError(f"metadata: row {row} is {type(value).__name__}, allowed: a JSON object a row")
    return value


def _texts(column: NDArray, name: str = "sentences") -> list[str]:
    try:
        return [bytes(entry).decode() for entry in column[:, 0]]
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: got bytes that are not UTF-8 text: {error}") from error


def _token_tensors(arrays: Mapping[str, NDArray]) -> dict[str, Tensor]:
    lengths = arrays["sequence_lengths"]
    prompt_lengths = arrays.get("prompt_lengths", np.zeros_like(lengths))
    return {
        "tokens": tensor(arrays["tokens"]),
        "lengths": tensor(lengths[:, 0]),
        "prompt_lengths": tensor(prompt_lengths[:, 0]),
    }
