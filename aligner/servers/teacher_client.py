"""The trainer's side of the teacher: log-probs of the policy's samples, asked for while further ones are drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aligner.placement.addresses import Access, Endpoint
from aligner.schema.reasoning_tasks import TASK
from aligner.servers.remote_client import RemoteClient, RemoteFuture
from aligner.servers.wire_protocol import TEACHER_LOGPROBS


class TeacherClient(RemoteClient):
    """The teacher's servers."""

    def __init__(
        self, endpoints: Sequence[Endpoint], access: Access, timeout_s: float, max_batch_size: int, temperature: float
    ) -> None:
        """Log-probs are at `temperature`, the policy's own when it samples."""
        super().__init__("teacher", endpoints, access, timeout_s, max_batch_size)
        self._temperature = temperature

    def logprobs(
        self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor, metadata: Sequence[Mapping[str, Any]]
    ) -> RemoteFuture[Tensor]:
        """float32 [B, S-1] of right-padded tokens int64 [B, S], lengths and prompt lengths int64 [B]; entry t is of token t+1.

        Zeros in the prompts and past a sequence's end. `metadata` is what the data says about each row's prompt, of which its
        task is told.
        """
        tasks = [{TASK: fields[TASK]} if TASK in fields else {} for fields in metadata]

        def logprobs() -> Tensor:
            found = torch.zeros(len(tokens), tokens.shape[1] - 1)
            # Numbered requests are computed alone, so that log-probs do not depend on who else asks.
            for rows, arrays in self._row_requests(tokens, lengths, 0, prompt_lengths, tasks):
                arrays["temperature"] = np.full((len(arrays["tokens"]), 1), self._temperature, dtype=np.float32)
                answer = self._infer(TEACHER_LOGPROBS, arrays)["logprobs"]
                found[rows, : answer.shape[1]] = torch.from_numpy(answer.copy())
            return found

        return self._future(self._parallel, logprobs)
