"""The reward role: it scores responses by functions, HTTP scorers, judges and reward models.

The scores are computed on the role's own ranks, or on the critic's ranks.
"""

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

from aligner.data.tokenizer import ResponseDecoder, extract_ids_with_bos, read_tokenizer
from aligner.errors import ConfigError
from aligner.models.model_source import model_directory, read_normalization
from aligner.models.vocabulary import require_same_vocabulary
from aligner.paths import get_run_paths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.judge import build_judge
from aligner.rewards.sources import (
    CombinedReward,
    ModelSource,
    RewardNormalizer,
    RewardSource,
    ScoringBatch,
    TextSource,
    build_step_source,
    build_text_source,
)
from aligner.schema import Config, reward_sources
from aligner.servers.rank_commands import Handler, RowBatcher, rank_handler
from aligner.servers.serving import Caller, compute_model_limits, copy_to_tensor, serve_frozen
from aligner.servers.triton_host import EndpointFunction
from aligner.servers.validation import Limits
from aligner.servers.value_models import ValueModel
from aligner.servers.wire_protocol import (
    REWARD_MODEL,
    EndpointSpec,
    RequestError,
    decode_text_column,
    parse_metadata,
)


def serve_reward(config: Config, group: str = "reward") -> None:
    """Run one rank of the reward server until it is stopped.

    Args:
        config: The run's configuration.
        group: Name of the process group: `reward`, or a replica.

    Raises:
        ConfigError: `reward.parallel` has several ranks, but there is no reward model.
    """
    if reward_sources.has_reward_model(config.reward):
        from aligner.megatron.value_model import build_reward_model
        from aligner.megatron.world import initialize, shutdown

        world = initialize(config.reward.parallel, config.seed, config.cluster.collective_timeout_s)
        run_reward(
            config,
            build_reward_rank(
                config, lambda directory: build_reward_model(config, directory, world)
            ),
            group,
        )
        shutdown()  # otherwise the threads of the process groups can abort the exiting interpreter
    elif config.reward.parallel.ranks == 1:
        run_reward(config, build_reward_rank(config), group)
    else:
        raise ConfigError(
            f"reward.parallel: got {config.reward.parallel.ranks} ranks, must be 1 without a reward"
            " model"
        )


def run_reward(config: Config, reward: "RewardRank", group: str = "reward") -> None:
    """Serve the scores. Collective."""
    serve_frozen(group, config, reward.handlers, reward.create_endpoints, reward.limits)


class RewardRank:
    """One rank's part of the reward. All ranks call every handler."""

    def __init__(self, reward: CombinedReward, tokenizer: Tokenizer, limits: Limits) -> None:
        self._reward = reward
        self._tokenizer = tokenizer
        self._response_decoder = ResponseDecoder(tokenizer)
        self.limits = limits
        """Limits of requests that all sources accept."""
        self._requires_tokens = any(isinstance(source, ModelSource) for _, source in reward.parts)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The function that each rank executes for an operation, by the name of the operation."""
        return {"score": self.score}

    @rank_handler(batcher=RowBatcher(("texts", "metadata")))
    def score(
        self,
        tokens: Tensor | None = None,
        lengths: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
        texts: Sequence[str] | None = None,
        metadata: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Score responses, or whole texts, which count as responses without a prompt.

        Args:
            tokens: int64 [B, S], prompts and responses. For texts, tokens are required only by
                reward models.
            lengths: int64 [B].
            prompt_lengths: int64 [B].
            texts: B texts to score as they are; None scores the responses in `tokens`.
            metadata: The fields of each row's prompt record, B JSON objects.

        Returns:
            `rewards` float32 [B], the score of each source under the source's number, and `steps`
            if a source rewards steps.
        """

        # Sources decode rows on demand. The cache lets several sources share the decoded rows.
        @functools.cache
        def build_requests(*, skip_special_tokens: bool) -> list[ScoringRequest]:
            """Return a scoring request for each row."""
            pairs = (
                self._decode_rows(tokens, lengths, prompt_lengths, skip_special_tokens)
                if texts is None
                else [("", text) for text in texts]
            )
            fields = [{}] * len(pairs) if metadata is None else parse_metadata(metadata)
            return [
                ScoringRequest(prompt, response, row_fields)
                for (prompt, response), row_fields in zip(pairs, fields, strict=True)
            ]

        without_special_tokens, with_special_tokens = (
            functools.partial(build_requests, skip_special_tokens=skip_special_tokens)
            for skip_special_tokens in (True, False)
        )
        find_token = (
            None
            if tokens is None or lengths is None
            else functools.partial(self._find_token, tokens, lengths, prompt_lengths)
        )

        rewards, parts, steps = self._reward.compute_scores_and_steps(
            ScoringBatch(without_special_tokens, tokens, lengths, with_special_tokens, find_token)
        )
        step_rewards = {} if steps is None else {"steps": steps}
        return (
            {"rewards": rewards}
            | step_rewards
            | {str(number): part for number, part in enumerate(parts)}
        )

    def create_endpoints(self, call: Caller) -> Mapping[EndpointSpec, EndpointFunction]:
        """Return rank 0's endpoint functions."""

        def rewards(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            """Return the scores of sentences or of token ids; see `REWARD_MODEL` for the arrays."""
            texts = metadata = None
            if "metadata" in arrays:
                metadata = decode_text_column("metadata", arrays["metadata"])
                # Invalid metadata is refused before the ranks have any work.
                parse_metadata(metadata)
            if "sentences" in arrays:
                texts = decode_text_column("sentences", arrays["sentences"])
                tensors = self._encode_texts(texts) if self._requires_tokens else {}
            else:
                lengths = arrays["sequence_lengths"]
                columns = {
                    "lengths": lengths,
                    "prompt_lengths": arrays.get("prompt_lengths", np.zeros_like(lengths)),
                }
                tensors = {"tokens": copy_to_tensor(arrays["tokens"])} | {
                    name: copy_to_tensor(columns[name][:, 0]) for name in columns
                }
            scores = call(
                "score",
                tensors,
                is_unbatched="sequence_number" in arrays,
                texts=texts,
                metadata=metadata,
            )
            rewards = {"rewards": scores.pop("rewards").float().cpu().numpy()[:, None]}
            if (steps := scores.pop("steps", None)) is not None and steps.shape[1] > 1:
                # On the wire, entry t belongs to token t+1.
                rewards["step_rewards"] = steps[:, 1:].contiguous().cpu().numpy()
            return (
                rewards
                if len(scores) < 2
                else rewards | {"reward_parts": torch.stack([*scores.values()], 1).cpu().numpy()}
            )

        return {REWARD_MODEL: rewards}

    def _decode_rows(
        self,
        tokens: Tensor | None,
        lengths: Tensor | None,
        prompt_lengths: Tensor | None,
        skip_special_tokens: bool,
    ) -> list[tuple[str, str]]:
        """Return prompt and response of each row, with or without special tokens.

        Each response is decoded in the context of its prompt.
        """
        assert tokens is not None and lengths is not None and prompt_lengths is not None
        rows = zip(tokens.tolist(), lengths.tolist(), prompt_lengths.tolist(), strict=True)
        pairs = [(row[:prompt], row[prompt:length]) for row, length, prompt in rows]

        prompts = self._tokenizer.decode_batch(
            [prompt for prompt, _ in pairs], skip_special_tokens=skip_special_tokens
        )
        responses = self._response_decoder.decode_batch_after(
            pairs, skip_special_tokens=skip_special_tokens
        )
        return list(zip(prompts, responses, strict=True))

    def _find_token(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor | None,
        row: int,
        characters: int,
    ) -> int:
        """Return the position of the token at which the decoded response has enough characters.

        The position is at most that of the row's last token.

        Args:
            tokens: int64 [B, S].
            lengths: int64 [B].
            prompt_lengths: int64 [B].
            row: Index of the row.
            characters: Number of characters.
        """
        first = 0 if prompt_lengths is None else int(prompt_lengths[row])
        prompt = tokens[row, :first]
        response = tokens[row, first : int(lengths[row])].tolist()

        def is_long_enough(count: int) -> bool:
            return len(self._response_decoder.decode_after(prompt, response[:count])) >= characters

        # The length of the decoded text grows with the number of tokens: search by bisection.
        return first + max(
            0, bisect.bisect_left(range(len(response)), True, key=is_long_enough) - 1
        )

    def _encode_texts(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Tokenize texts for a reward model. Raise RequestError if one is too long."""
        rows = [
            extract_ids_with_bos(encoding) for encoding in self._tokenizer.encode_batch(list(texts))
        ]
        lengths = [len(row) for row in rows]
        longest = self.limits.max_sequence_length
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


def build_reward_rank(
    config: Config, build_model: Callable[[Path], ValueModel] | None = None
) -> RewardRank:
    """Build the reward that the configuration describes.

    Args:
        config: The run's configuration.
        build_model: Loads the reward model in a directory on this rank.

    Raises:
        ConfigError: A reward source is not usable.
    """
    directory = model_directory(config)
    tokenizer = read_tokenizer(directory)
    limits = compute_model_limits(config, directory, tokenizer.get_vocab_size())
    parts: list[tuple[reward_sources.Source, RewardSource]] = []
    for source in reward_sources.parse_reward_sources(config.reward):
        if isinstance(source, reward_sources.ModelSource):
            assert build_model is not None
            require_same_vocabulary(f"{source.key}.path", Path(source.path), directory)
            model = build_model(Path(source.path))
            normalizer = RewardNormalizer(*read_normalization(Path(source.path)))
            step_settings = source.step_separator, source.step_probability
            parts.append((source, ModelSource(source.name, model, normalizer, *step_settings)))
            model_request_limits = compute_model_limits(
                config, Path(source.path), model.vocab_size, f"{source.key}.path"
            )
            limits = intersect_limits(limits, model_request_limits)
        elif isinstance(source, reward_sources.JudgeSource):
            parts.append(
                (source, TextSource(source.name, build_judge(source, get_run_paths(config))))
            )
        elif isinstance(source, reward_sources.FunctionSource) and source.step_rewards:
            parts.append((source, build_step_source(source)))
        else:
            parts.append((source, build_text_source(source)))
    reward = CombinedReward(parts, config.reward.combine, config.reward.disagreement_weight)
    return RewardRank(reward, tokenizer, limits)


def intersect_limits(limits: Limits, other_limits: Limits) -> Limits:
    """Return the limits of requests that both models accept."""
    longest = min(limits.max_sequence_length, other_limits.max_sequence_length)
    return Limits(
        min(limits.vocab_size, other_limits.vocab_size), longest, limits.max_request_tokens
    )
