"""The reward role: a scoring function or a Megatron reward model behind Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from aligner.config.paths import model_directory
from aligner.config.schema import Config
from aligner.errors import ConfigError
from aligner.rewards.scorers import Scorer, ScoringRequest, checked_scores, resolve_scorer
from aligner.servers.backend import ValueModel
from aligner.servers.executor import Handler
from aligner.servers.host import Serve
from aligner.servers.protocol import PROTOCOL_VERSION, REWARD_MODEL, EndpointSpec, RequestError
from aligner.servers.serving import Caller, model_limits, serve_role, tensor
from aligner.servers.validation import Limits


def serve_reward(config: Config) -> None:
    """One rank of the reward server, until it is told to stop."""
    directory = model_directory(config)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if config.reward.kind == "function":
        if config.reward.parallel.ranks != 1:
            raise ConfigError(f"reward.parallel: {config.reward.parallel.ranks} ranks, must be 1 with reward.kind=function")
        scorer = resolve_scorer(config.reward.function)
        run_function_reward(config, scorer, tokenizer, model_limits(config, directory, tokenizer.get_vocab_size()))
        return
    from aligner.megatron.value_model import build_value_model
    from aligner.megatron.world import initialize

    world = initialize(config.reward.parallel, config.seed, config.cluster.collective_timeout_s)
    model = build_value_model(config, "reward", world)
    run_model_reward(config, model, tokenizer, model_limits(config, directory, model.vocab_size))


def run_function_reward(config: Config, scorer: Scorer, tokenizer: Tokenizer, limits: Limits) -> None:
    """Serve a scoring function over decoded texts, in this one process."""

    def score_texts(texts: Sequence[str]) -> Tensor:
        return torch.tensor(checked_scores(scorer, [ScoringRequest("", text) for text in texts]))

    def score_tokens(tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        requests = []
        for row, length, prompt_length in zip(tokens.tolist(), lengths.tolist(), prompt_lengths.tolist(), strict=True):
            prompt, response = tokenizer.decode_batch(
                [row[:prompt_length], row[prompt_length:length]], skip_special_tokens=True
            )
            requests.append(ScoringRequest(prompt, response))
        return torch.tensor(checked_scores(scorer, requests))

    def endpoints(call: Caller) -> Mapping[EndpointSpec, Serve]:
        def rewards(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            if "sentences" in arrays:
                return _rewards(call("score_texts", texts=_texts(arrays["sentences"])))
            return _rewards(call("score_tokens", _token_tensors(arrays)))

        return {REWARD_MODEL: rewards}

    handlers: dict[str, Handler] = {"score_tokens": score_tokens, "score_texts": score_texts, "version": _version}
    serve_role("reward", config, handlers, endpoints, ("version",), limits)


def run_model_reward(config: Config, model: ValueModel, tokenizer: Tokenizer, limits: Limits) -> None:
    """Serve a reward model: the value after a sequence's last token. Every rank of its world calls this."""

    def score_tokens(tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        return model.values(tokens, lengths).gather(1, lengths[:, None] - 1)[:, 0]

    def endpoints(call: Caller) -> Mapping[EndpointSpec, Serve]:
        def rewards(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            if "sentences" in arrays:
                tensors = _encoded(tokenizer, _texts(arrays["sentences"]), limits)
            else:
                tensors = _token_tensors(arrays)
            return _rewards(call("score_tokens", tensors))

        return {REWARD_MODEL: rewards}

    handlers: dict[str, Handler] = {"score_tokens": score_tokens, "version": _version}
    serve_role("reward", config, handlers, endpoints, ("version",), limits)


def _version() -> dict[str, Any]:
    return {"protocol": PROTOCOL_VERSION, "version": 0}


def _rewards(scores: Tensor) -> dict[str, NDArray]:
    return {"rewards": scores.float().cpu().numpy()[:, None]}


def _token_tensors(arrays: Mapping[str, NDArray]) -> dict[str, Tensor]:
    lengths = arrays["sequence_lengths"]
    prompt_lengths = arrays.get("prompt_lengths", np.zeros_like(lengths))
    return {
        "tokens": tensor(arrays["tokens"]),
        "lengths": tensor(lengths[:, 0]),
        "prompt_lengths": tensor(prompt_lengths[:, 0]),
    }


def _texts(sentences: NDArray) -> list[str]:
    try:
        return [bytes(sentence).decode() for sentence in sentences[:, 0]]
    except UnicodeDecodeError as error:
        raise RequestError(f"sentences: got bytes that are not UTF-8 text: {error}") from error


def _encoded(tokenizer: Tokenizer, texts: Sequence[str], limits: Limits) -> dict[str, Tensor]:
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    lengths = [len(row) for row in rows]
    if min(lengths) < 1 or max(lengths) > limits.max_sequence_length:
        raise RequestError(
            f"sentences: got {min(lengths)} to {max(lengths)} tokens, allowed: 1 to {limits.max_sequence_length}"
        )
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
    return {"tokens": tokens, "lengths": torch.tensor(lengths), "prompt_lengths": torch.zeros(len(rows), dtype=torch.int64)}
