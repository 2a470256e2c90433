"""The teacher role: log-probs of given tokens, and the most probable ones, under frozen language
models on its own ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.types import TaughtTokens, response_mask
from aligner.errors import ConfigError
from aligner.megatron.policy import FrozenPolicy
from aligner.megatron.world import initialize, shutdown
from aligner.models.model_source import directory_shape, model_directory
from aligner.models.vocabulary import require_policys_tokens
from aligner.schema import Config
from aligner.schema.teacher_sources import TeacherSource, teacher_shares, teacher_sources
from aligner.servers.rank_commands import Handler, RowJoin, rank_handler
from aligner.servers.serving import Caller, model_limits, serve_frozen, tensor
from aligner.servers.triton_host import Serve
from aligner.servers.wire_protocol import (
    TEACHER_LOGPROBS,
    Arrays,
    EndpointSpec,
    RequestError,
    column_texts,
    json_objects,
)


def serve_teacher(config: Config, group: str = "teacher") -> None:
    """One rank of the teacher, or of the replica that `group` names, until it is told to stop.

    Raises ConfigError where a model is not there, or has another tokenizer than the policy.
    """
    settings, sources = config.teacher, teacher_sources(config.teacher)
    shapes = [directory_shape(Path(source.path), f"{source.key}.path") for source in sources]
    policy = model_directory(config)
    for source in sources:
        require_policys_tokens(f"{source.key}.path", Path(source.path), policy)
    world = initialize(settings.parallel, config.seed, config.cluster.collective_timeout_s)
    models = [
        FrozenPolicy(shape, world, settings, Path(source.path), settings.logprob_chunk_tokens)
        for source, shape in zip(sources, shapes, strict=True)
    ]
    known = [directory_shape(policy, "model.path")] if policy.exists() else []
    teacher = Teacher(models, sources, min(shape.vocab_size for shape in (*shapes, *known)))
    limits = min(
        (
            model_limits(
                config,
                Path(source.path),
                min(shape.vocab_size for shape in shapes),
                f"{source.key}.path",
            )
            for source in sources
        ),
        key=lambda limits: limits.max_sequence_length,
    )
    serve_frozen(group, config, teacher.handlers, teacher.endpoints, limits)
    shutdown()  # the groups' threads would abort an interpreter that ends under them


class Teacher:
    """One rank's side of the teacher. Every rank of the world calls every handler."""

    def __init__(
        self, models: Sequence[FrozenPolicy], sources: Sequence[TeacherSource], vocabulary: int
    ) -> None:
        """The most probable tokens are told of the ids below `vocabulary`, which the policy and all
        of these know."""
        self._models, self._sources, self._vocabulary = models, sources, vocabulary

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What each op does."""
        return {"teacher_logprobs": self.logprobs}

    @rank_handler(join=RowJoin(("shares",)))
    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor | None = None,
        temperature: float = 1.0,
        shares: Sequence[Sequence[float]] | None = None,
        top_k: int = 0,
    ) -> Tensor:
        """float32 [B, S] of tokens int64 [B, S], lengths and prompt lengths int64 [B]: entry t is
        of token t+1, the last is 0.

        Zeros past a sequence's end and, with prompt lengths, in the prompt. As wide as the tokens,
        for joined requests are cut apart at these. With `shares`, each model's in each row, they
        are the models' mean by these. With `top_k` it is what `TaughtTokens` packs, of so many
        tokens, [B, S, 2+2k]; then each row must have one model.
        """
        mask = (
            None
            if prompt_lengths is None
            else response_mask(lengths, prompt_lengths, tokens.shape[1])
        )
        parts = torch.ones(len(tokens), 1) if shares is None else torch.tensor(shares)
        columns = (2 + 2 * min(top_k, self._vocabulary),) if top_k else ()
        found = torch.zeros(*tokens.shape, *columns)
        for model, part in zip(self._models, parts.unbind(1), strict=shares is not None):
            if len(rows := part.nonzero()[:, 0]):
                its: Any = {
                    "mask": None if mask is None else mask[rows],
                    "temperature": temperature,
                }
                if top_k:
                    taught = model.taught(
                        tokens[rows], lengths[rows], top_k, self._vocabulary, **its
                    )
                    found[rows, :-1] = taught.packed().cpu()
                else:
                    found[rows] += part[rows, None] * F.pad(
                        model.logprobs(tokens[rows], lengths[rows], **its).cpu(), (0, 1)
                    )
        return found

    def endpoints(self, call: Caller) -> Mapping[EndpointSpec, Serve]:
        """Rank 0's endpoint functions."""

        def logprobs(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            tensors = {
                "tokens": tensor(arrays["tokens"]),
                "lengths": tensor(arrays["sequence_lengths"][:, 0]),
            }
            if "prompt_lengths" in arrays:
                tensors["prompt_lengths"] = tensor(arrays["prompt_lengths"][:, 0])
            shares = self._shares(arrays)
            temperature = float(arrays["temperature"][0, 0]) if "temperature" in arrays else 1.0
            told: dict[str, Any] = {"temperature": temperature} | (
                {} if shares is None else {"shares": shares}
            )
            if "top_k" in arrays:
                told["top_k"] = int(arrays["top_k"][0, 0])
                if any(share not in (0.0, 1.0) for row in shares or () for share in row):
                    raise RequestError(
                        "top_k: got rows that belong to several teachers, allowed: exactly one"
                        " teacher per row"
                    )
            found = call("teacher_logprobs", tensors, alone="sequence_number" in arrays, **told)[
                :, :-1
            ]
            return (
                _answer(TaughtTokens.unpacked(found))
                if "top_k" in arrays
                else {"logprobs": found.contiguous().numpy()}
            )

        return {TEACHER_LOGPROBS: logprobs}

    def _shares(self, arrays: Arrays) -> list[list[float]] | None:
        """Each model's in each of a request's rows; None where there is one model for all. Raises
        RequestError."""
        if len(self._sources) == 1 and not self._sources[0].tasks:
            return None
        told = (
            json_objects(column_texts("metadata", arrays["metadata"]))
            if "metadata" in arrays
            else None
        )
        try:
            return [
                teacher_shares(self._sources, fields)
                for fields in told or [{}] * len(arrays["tokens"])
            ]
        except ConfigError as error:
            raise RequestError(str(error)) from error


def _answer(taught: TaughtTokens) -> dict[str, NDArray]:
    tensors = {"logprobs": taught.logprobs, "top_ids": taught.ids}
    tensors |= {
        "top_logprobs": taught.outcomes[..., :-1],
        "rest_logprobs": taught.outcomes[..., -1],
    }
    return {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
