"""The teacher role: it scores responses with frozen language models on its own ranks.

The scores are log-probs of the responses' tokens, and the most probable tokens at each position.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.grammar_matcher import GrammarVocabulary
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import TeacherTopK, build_response_mask
from aligner.errors import ConfigError
from aligner.megatron.grammar_masks import GrammarMasks
from aligner.megatron.policy import FrozenPolicy
from aligner.megatron.world import initialize, shutdown
from aligner.models.model_source import directory_shape, model_directory
from aligner.models.vocabulary import require_same_vocabulary
from aligner.schema import Config
from aligner.schema.teacher_sources import (
    TeacherSource,
    compute_teacher_shares,
    parse_teacher_sources,
)
from aligner.servers.rank_commands import Handler, RowBatcher, rank_handler
from aligner.servers.serving import Caller, compute_model_limits, copy_to_tensor, serve_frozen
from aligner.servers.triton_host import EndpointFunction
from aligner.servers.wire_protocol import (
    TEACHER_LOGPROBS,
    Arrays,
    EndpointSpec,
    RequestError,
    decode_text_column,
    grammars_from_texts,
    parse_metadata,
)


def serve_teacher(config: Config, group: str = "teacher") -> None:
    """Run one rank of the teacher until it is stopped.

    Args:
        config: The run's configuration.
        group: Name of the process group: `teacher`, or a replica.

    Raises:
        ConfigError: A model does not exist, or its tokenizer differs from the policy's.
    """
    settings = config.teacher
    sources = parse_teacher_sources(config.teacher)
    shapes = [directory_shape(Path(source.path), f"{source.key}.path") for source in sources]
    policy_directory = model_directory(config)
    for source in sources:
        require_same_vocabulary(f"{source.key}.path", Path(source.path), policy_directory)

    world = initialize(settings.parallel, config.seed, config.cluster.collective_timeout_s)
    models = [
        FrozenPolicy(shape, world, settings, Path(source.path), settings.logprob_chunk_tokens)
        for source, shape in zip(sources, shapes, strict=True)
    ]
    policy_shapes = (
        [directory_shape(policy_directory, "model.path")] if policy_directory.exists() else []
    )
    # Grammars allow tokens of the policy's vocabulary.
    tokenizer_directory = policy_directory if policy_shapes else Path(sources[0].path)
    teacher = TeacherRank(
        models,
        sources,
        min(shape.vocab_size for shape in (*shapes, *policy_shapes)),
        tokenizer_directory,
    )
    limits = min(
        (
            compute_model_limits(
                config,
                Path(source.path),
                min(shape.vocab_size for shape in shapes),
                f"{source.key}.path",
            )
            for source in sources
        ),
        key=lambda limits: limits.max_sequence_length,
    )
    serve_frozen(group, config, teacher.handlers, teacher.create_endpoints, limits)
    shutdown()  # otherwise the threads of the process groups can abort the exiting interpreter


class TeacherRank:
    """One rank's part of the teacher. All ranks call every handler."""

    def __init__(
        self,
        models: Sequence[FrozenPolicy],
        sources: Sequence[TeacherSource],
        vocab_size: int,
        tokenizer_directory: Path | None = None,
    ) -> None:
        """Store the models.

        Args:
            models: One model for each source.
            sources: The configured teachers.
            vocab_size: Number of token ids that the policy and all models have in common. Only
                these can be among the most probable tokens.
            tokenizer_directory: Directory with the tokenizer, which grammars require; None:
                requests with grammars are refused.
        """
        self._models = models
        self._tokenizer_directory = tokenizer_directory
        self._sources = sources
        self._vocab_size = vocab_size

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The function that each rank executes for an operation, by the name of the operation."""
        return {"teacher_logprobs": self.logprobs}

    @cached_property
    def _grammar_vocabulary(self) -> GrammarVocabulary:
        """The bytes of the tokens, read when the first request has a grammar."""
        if self._tokenizer_directory is None:
            raise RequestError("grammars: got grammars, but the teacher has no tokenizer")
        return Tokenizer(self._tokenizer_directory).grammar_vocabulary

    @rank_handler(batcher=RowBatcher(("shares", "grammars")))
    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor | None = None,
        temperature: float = 1.0,
        shares: Sequence[Sequence[float]] | None = None,
        top_k: int = 0,
        grammars: Sequence[str] | None = None,
    ) -> Tensor:
        """Return log-probs of tokens, float32 [B, S].

        Entry t belongs to token t+1, and the last entry is 0. Entries after the end of a sequence
        are 0. With `prompt_lengths`, entries of prompt tokens are 0, too. The result is as wide as
        the tokens, so that a batch of requests can be split.

        Args:
            tokens: int64 [B, S].
            lengths: int64 [B].
            prompt_lengths: int64 [B].
            temperature: Temperature of the log-probs.
            shares: Weight of each model in each row, [B, M]. The result is the weighted mean of the
                models' log-probs. None means a single model.
            top_k: Number of most probable tokens to return. The result is then [B, S, 2+2k], packed
                by `TeacherTopK`, and each row must have a single model.
            grammars: Tokens of each row that follow a grammar, as JSON (see `grammars_to_texts`).
                Their probabilities are normalized over the tokens that the grammar allows.
        """
        guided_tokens = None
        if grammars is not None:
            guided_tokens = grammars_from_texts(grammars, tokens.shape[1])
        mask = (
            None
            if prompt_lengths is None
            else build_response_mask(lengths, prompt_lengths, tokens.shape[1])
        )

        # Each model computes only the rows in which it has a share.
        share_matrix = torch.ones(len(tokens), 1) if shares is None else torch.tensor(shares)
        columns = (2 + 2 * min(top_k, self._vocab_size),) if top_k else ()
        result = torch.zeros(*tokens.shape, *columns)
        for model, share in zip(self._models, share_matrix.unbind(1), strict=shares is not None):
            if len(rows := share.nonzero()[:, 0]):
                arguments: Any = {
                    "mask": None if mask is None else mask[rows],
                    "temperature": temperature,
                }
                if guided_tokens is not None:
                    arguments["grammar_masks"] = GrammarMasks(
                        self._grammar_vocabulary, tokens[rows], guided_tokens.select(rows)
                    )
                if top_k:
                    taught = model.top_k_logprobs(
                        tokens[rows], lengths[rows], top_k, self._vocab_size, **arguments
                    )
                    result[rows, :-1] = taught.pack().cpu()
                else:
                    result[rows] += share[rows, None] * F.pad(
                        model.logprobs(tokens[rows], lengths[rows], **arguments).cpu(), (0, 1)
                    )
        return result

    def create_endpoints(self, call: Caller) -> Mapping[EndpointSpec, EndpointFunction]:
        """Return rank 0's endpoint functions."""

        def logprobs(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            """Return the teachers' log-probs of tokens, or their top-k ids and log-probs."""
            tensors = {
                "tokens": copy_to_tensor(arrays["tokens"]),
                "lengths": copy_to_tensor(arrays["sequence_lengths"][:, 0]),
            }
            if "prompt_lengths" in arrays:
                tensors["prompt_lengths"] = copy_to_tensor(arrays["prompt_lengths"][:, 0])

            shares = self._read_shares(arrays)
            temperature = float(arrays["temperature"][0, 0]) if "temperature" in arrays else 1.0
            arguments: dict[str, Any] = {"temperature": temperature} | (
                {} if shares is None else {"shares": shares}
            )
            if "top_k" in arrays:
                arguments["top_k"] = int(arrays["top_k"][0, 0])
                if any(share not in (0.0, 1.0) for row in shares or () for share in row):
                    raise RequestError(
                        "top_k: got rows that belong to several teachers, allowed: exactly one"
                        " teacher per row"
                    )

            if "grammars" in arrays:
                arguments["grammars"] = decode_text_column("grammars", arrays["grammars"])
                self._check_grammars(tensors["tokens"], arguments["grammars"])

            # The last column belongs to the token after the end of the rows.
            result = call(
                "teacher_logprobs", tensors, is_unbatched="sequence_number" in arrays, **arguments
            )[:, :-1]
            return (
                _to_arrays(TeacherTopK.unpack(result))
                if "top_k" in arrays
                else {"logprobs": result.contiguous().numpy()}
            )

        return {TEACHER_LOGPROBS: logprobs}

    def _check_grammars(self, tokens: Tensor, texts: Sequence[str]) -> None:
        """Raise RequestError unless tokens follow their grammars, before any rank computes them.

        Args:
            tokens: int64 [B, S].
            texts: The argument `grammars` of `logprobs`.
        """
        vocabulary = self._grammar_vocabulary
        guided_tokens = grammars_from_texts(texts, tokens.shape[1])
        for index, grammar in enumerate(guided_tokens.grammars):
            try:
                matcher = vocabulary.start(grammar.text, grammar.stop_token_ids)
            except ValueError as error:
                raise RequestError(f"grammars: {error}") from error
            is_guided = guided_tokens.spans == index
            if not matcher.allows(tokens[:, 1:][is_guided].tolist()):
                row = int(is_guided.any(1).nonzero()[0])
                raise RequestError(
                    f"grammars: the tokens of row {row} do not follow their grammar; trainer and"
                    " teacher must have the same version of llguidance and the same tokenizer"
                )

    def _read_shares(self, arrays: Arrays) -> list[list[float]] | None:
        """Return the weight of each model in each row of a request; None means a single model.

        Raises:
            RequestError: A row has no teacher, or its metadata is not valid.
        """
        if len(self._sources) == 1 and not self._sources[0].tasks:
            return None
        metadata = (
            parse_metadata(decode_text_column("metadata", arrays["metadata"]))
            if "metadata" in arrays
            else None
        )
        try:
            return [
                compute_teacher_shares(self._sources, fields)
                for fields in metadata or [{}] * len(arrays["tokens"])
            ]
        except ConfigError as error:
            raise RequestError(str(error)) from error


def _to_arrays(top_tokens: TeacherTopK) -> dict[str, NDArray]:
    """Return the output tensors of a request for the most probable tokens."""
    tensors = {"logprobs": top_tokens.logprobs, "top_ids": top_tokens.ids}
    tensors |= {
        "top_logprobs": top_tokens.outcomes[..., :-1],
        "rest_logprobs": top_tokens.outcomes[..., -1],
    }
    return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
