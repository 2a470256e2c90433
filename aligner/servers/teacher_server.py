"""The teacher role: log-probs of given tokens under a frozen language model, on its own ranks."""

from collections.abc import Mapping
from pathlib import Path

import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.types import response_mask
from aligner.megatron.policy import FrozenPolicy
from aligner.megatron.world import initialize, shutdown
from aligner.models.model_source import directory_shape, model_directory
from aligner.models.vocabulary import require_policys_tokens
from aligner.schema import Config
from aligner.servers.rank_commands import Handler, RowJoin, rank_handler
from aligner.servers.serving import Caller, model_limits, serve_frozen, tensor
from aligner.servers.triton_host import Serve
from aligner.servers.wire_protocol import TEACHER_LOGPROBS, EndpointSpec


def serve_teacher(config: Config, group: str = "teacher") -> None:
    """One rank of the teacher, or of the replica that `group` names, until it is told to stop.

    Raises ConfigError where the model is not there, or has another tokenizer than the policy.
    """
    settings, directory = config.teacher, Path(str(config.teacher.path))
    shape = directory_shape(directory, "teacher.path")
    require_policys_tokens("teacher.path", directory, model_directory(config))
    world = initialize(settings.parallel, config.seed, config.cluster.collective_timeout_s)
    teacher = Teacher(FrozenPolicy(shape, world, settings, directory, settings.logprob_chunk_tokens))
    limits = model_limits(config, directory, shape.vocab_size, "teacher.path")
    serve_frozen(group, config, teacher.handlers, teacher.endpoints, limits)
    shutdown()  # the groups' threads would abort an interpreter that ends under them


class Teacher:
    """One rank's side of the teacher. Every rank of the world calls every handler."""

    def __init__(self, model: FrozenPolicy) -> None:
        self._model = model

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What each op does."""
        return {"teacher_logprobs": self.logprobs}

    @rank_handler(join=RowJoin())
    def logprobs(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor | None = None, temperature: float = 1.0
    ) -> Tensor:
        """float32 [B, S] of tokens int64 [B, S], lengths and prompt lengths int64 [B]: entry t is of token t+1, the last is 0.

        Zeros past a sequence's end and, with prompt lengths, in the prompt. As wide as the tokens, for joined requests are cut
        apart at these.
        """
        mask = None if prompt_lengths is None else response_mask(lengths, prompt_lengths, tokens.shape[1])
        return F.pad(self._model.logprobs(tokens, lengths, mask=mask, temperature=temperature), (0, 1))

    def endpoints(self, call: Caller) -> Mapping[EndpointSpec, Serve]:
        """Rank 0's endpoint functions."""

        def logprobs(arrays: dict[str, NDArray]) -> dict[str, NDArray]:
            tensors = {"tokens": tensor(arrays["tokens"]), "lengths": tensor(arrays["sequence_lengths"][:, 0])}
            if "prompt_lengths" in arrays:
                tensors["prompt_lengths"] = tensor(arrays["prompt_lengths"][:, 0])
            temperature = float(arrays["temperature"][0, 0]) if "temperature" in arrays else 1.0
            found = call("teacher_logprobs", tensors, alone="sequence_number" in arrays, temperature=temperature)
            return {"logprobs": found[:, :-1].contiguous().cpu().numpy()}

        return {TEACHER_LOGPROBS: logprobs}
