"""The reward role: requests to scores, by functions, HTTP scorers, judges and models, on its own
ranks or the critic's."""

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.data.tokenizer import ResponseDecoder, read_tokenizer, with_beginning
from aligner.errors import ConfigError
from aligner.models.model_source import model_directory, read_normalization
from aligner.models.vocabulary import require_policys_tokens
from aligner.paths import run_paths
from aligner.rewards.judge import build_judge
from aligner.rewards.scorers import ScoringRequest
from aligner.rewards.sources import (
    CombinedReward,
    ModelSource,
    RewardNormalizer,
    RewardSource,
    ScoringBatch,
    TextSource,
    step_source,
    text_source,
)
from aligner.schema import Config, reward_sources
from aligner.servers.rank_commands import Handler, RowJoin, rank_handler
from aligner.servers.serving import Caller, model_limits, serve_frozen, tensor
from aligner.servers.triton_host import Serve
from aligner.servers.validation import Limits
from aligner.servers.value_models import ValueModel
from aligner.servers.wire_protocol import (
    REWARD_MODEL,
    EndpointSpec,
    RequestError,
    column_texts,
    json_objects,
)


def serve_reward(config: Config, group: str = "reward") -> None:
    """One rank of the reward server, or of the replica that `group` names, until it is told to
    stop."""
    if reward_sources.has_reward_model(config.reward):
        from aligner.megatron.value_model import build_reward_model
        from aligner.megatron.world import initialize, shutdown

        world = initialize(config.reward.parallel, config.seed, config.cluster.collective_timeout_s)
        run_reward(
            config,
            build_scoring(config, lambda directory: build_reward_model(config, directory, world)),
            group,
        )
        shutdown()  # the groups' threads would abort an interpreter that ends under them
    elif config.reward.parallel.ranks == 1:
        run_reward(config, build_scoring(config), group)
    else:
        raise ConfigError(
            f"reward.parallel: got {config.reward.parallel.ranks} ranks, must be 1 without a reward"
            " model"
        )


def run_reward(config: Config, scoring: "Scoring", group: str = "reward") -> None:
    """Serve the scores; every rank of their world calls this."""
    serve_frozen(group, config, scoring.handlers, scoring.endpoints, scoring.limits)


class Scoring:
    """One rank's side of the reward. Every rank of the world calls every handler."""

    def __init__(self, reward: CombinedReward, tokenizer: Tokenizer, limits: Limits) -> None:
        self._reward = reward
        self._tokenizer = tokenizer
        self._response_decoder = ResponseDecoder(tokenizer)
        self.limits = limits
        """What the reward takes."""
        self._wants_tokens = any(isinstance(source, ModelSource) for _, source in reward.parts)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What each op does."""
        return {"score": self.score}

    @rank_handler(join=RowJoin(("texts", "metadata")))
    def score(
        self,
        tokens: Tensor | None = None,
        lengths: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        texts: Sequence[str] | None = None,
        metadata: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """`rewards` float32 [B] of tokens int64 [B, S], lengths and prompt lengths int64 [B];
        `metadata` is B JSON objects.

        Or of whole texts, which are the responses to nothing; their tokens and lengths where a
        model wants them. What each source has given is there by its number.
        """

        @functools.cache
        def requests(*, skip: bool) -> list[ScoringRequest]:
            pairs = (
                self._decoded(tokens, lengths, prompt_lengths, skip)
                if texts is None
                else [("", text) for text in texts]
            )
            fields = [{}] * len(pairs) if metadata is None else json_objects(metadata)
            return [
                ScoringRequest(prompt, response, about)
                for (prompt, response), about in zip(pairs, fields, strict=True)
            ]

        plain, whole = (functools.partial(requests, skip=skip) for skip in (True, False))
        token_at = (
            None
            if tokens is None or lengths is None
            else functools.partial(self._token_at, tokens, lengths, prompt_lengths)
        )
        rewards, parts, steps = self._reward.in_steps(
            ScoringBatch(plain, tokens, lengths, whole, token_at)
        )
        inside = {} if steps is None else {"steps": steps}
        return (
            {"rewards": rewards} | inside | {str(number): part for number, part in enumerate(parts)}
        )

    def endpoints(self, call: Caller) -> Mapping[EndpointSpec, Serve]:
        """Rank 0's endpoint functions."""

        def rewards(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            texts = metadata = None
            if "metadata" in arrays:
                metadata = column_texts("metadata", arrays["metadata"])
                json_objects(metadata)  # what is none is refused before the ranks have any work
            if "sentences" in arrays:
                texts = column_texts("sentences", arrays["sentences"])
                tensors = self._encoded(texts) if self._wants_tokens else {}
            else:
                lengths = arrays["sequence_lengths"]
                columns = {
                    "lengths": lengths,
                    "prompt_lengths": arrays.get("prompt_lengths", np.zeros_like(lengths)),
                }
                tensors = {"tokens": tensor(arrays["tokens"])} | {
                    name: tensor(columns[name][:, 0]) for name in columns
                }
            scores = call(
                "score", tensors, alone="sequence_number" in arrays, texts=texts, metadata=metadata
            )
            rewards = {"rewards": scores.pop("rewards").float().cpu().numpy()[:, None]}
            if (steps := scores.pop("steps", None)) is not None and steps.shape[1] > 1:
                # entry t speaks of token t+1
                rewards["step_rewards"] = steps[:, 1:].contiguous().cpu().numpy()
            return (
                rewards
                if len(scores) < 2
                else rewards | {"reward_parts": torch.stack([*scores.values()], 1).cpu().numpy()}
            )

        return {REWARD_MODEL: rewards}

    def _decoded(
        self,
        tokens: Tensor | None,
        lengths: Tensor | None,
        prompt_lengths: Tensor | None,
        skip: bool,
    ) -> list[tuple[str, str]]:
        """Return prompt and response of each row, with or without special tokens.

        Each response is decoded as text behind its prompt.
        """
        assert tokens is not None and lengths is not None and prompt_lengths is not None
        rows = zip(tokens.tolist(), lengths.tolist(), prompt_lengths.tolist(), strict=True)
        halves = [(row[:prompt], row[prompt:length]) for row, length, prompt in rows]

        prompts = self._tokenizer.decode_batch(
            [prompt for prompt, _ in halves], skip_special_tokens=skip
        )
        responses = self._response_decoder.decode_batch_after(halves, skip_special_tokens=skip)
        return list(zip(prompts, responses, strict=True))

    def _token_at(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor | None,
        row: int,
        characters: int,
    ) -> int:
        """Return the position of the first token of a row up to which its response has a number of
        characters, at most the position of the last token."""
        first = 0 if prompt_lengths is None else int(prompt_lengths[row])
        prompt = tokens[row, :first]
        response = tokens[row, first : int(lengths[row])].tolist()

        def complete(count: int) -> bool:
            return len(self._response_decoder.decode_after(prompt, response[:count])) >= characters

        return first + max(0, bisect.bisect_left(range(len(response)), True, key=complete) - 1)

    def _encoded(self, texts: Sequence[str]) -> dict[str, Tensor]:
        rows = [with_beginning(encoding) for encoding in self._tokenizer.encode_batch(list(texts))]
        lengths, longest = [len(row) for row in rows], self.limits.max_sequence_length
        if min(lengths) < 1 or max(lengths) > longest:
            raise RequestError(
                f"sentences: got {min(lengths)} to {max(lengths)} tokens, allowed: 1 to {longest}"
            )
        largest = self.limits.vocab_size - 1
        for row, ids in enumerate(rows):
            if max(ids) > largest:
                raise RequestError(
                    f"sentences: row {row} has token id {max(ids)}, allowed: 0 to {largest} (the"
                    " model's vocabulary)"
                )
        tokens = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
        return {"tokens": tokens, "lengths": torch.tensor(lengths)}


def build_scoring(
    config: Config, build_model: Callable[[Path], ValueModel] | None = None
) -> Scoring:
    """The reward that the configuration describes; `build_model` reads the reward model in a
    directory onto this rank.

    Raises ConfigError when it cannot be had.
    """
    directory = model_directory(config)
    tokenizer = read_tokenizer(directory)
    limits = model_limits(config, directory, tokenizer.get_vocab_size())
    parts: list[tuple[reward_sources.Source, RewardSource]] = []
    for source in reward_sources.reward_sources(config.reward):
        if isinstance(source, reward_sources.ModelSource):
            assert build_model is not None
            require_policys_tokens(f"{source.key}.path", Path(source.path), directory)
            model = build_model(Path(source.path))
            normalizer = RewardNormalizer(*read_normalization(Path(source.path)))
            steps = source.step_separator, source.step_probability
            parts.append((source, ModelSource(source.name, model, normalizer, *steps)))
            its_limits = model_limits(
                config, Path(source.path), model.vocab_size, f"{source.key}.path"
            )
            limits = narrower(limits, its_limits)
        elif isinstance(source, reward_sources.JudgeSource):
            parts.append((source, TextSource(source.name, build_judge(source, run_paths(config)))))
        elif isinstance(source, reward_sources.FunctionSource) and source.step_rewards:
            parts.append((source, step_source(source)))
        else:
            parts.append((source, text_source(source)))
    combined = CombinedReward(parts, config.reward.combine, config.reward.disagreement_weight)
    return Scoring(combined, tokenizer, limits)


def narrower(limits: Limits, others: Limits) -> Limits:
    """What both models take."""
    longest = min(limits.max_sequence_length, others.max_sequence_length)
    return Limits(min(limits.vocab_size, others.vocab_size), longest, limits.max_request_tokens)
