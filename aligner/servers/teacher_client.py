"""The trainer's side of the teacher: what it says of the policy's samples, asked for while further
ones are drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligner.data.taught_tokens import TaughtTokens
from aligner.placement.addresses import Access, Endpoint
from aligner.schema.data import TASK
from aligner.servers.remote_client import RemoteClient, RemoteFuture, wide
from aligner.servers.wire_protocol import TEACHER_LOGPROBS


class TeacherClient(RemoteClient):
    """The teacher's servers."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Access,
        timeout_s: float,
        max_batch_size: int,
        temperature: float,
        top_k: int = 0,
    ) -> None:
        """Log-probs are at `temperature`, the policy's own when it samples; with `top_k` so many
        tokens are asked for too."""
        super().__init__("teacher", endpoints, access, timeout_s, max_batch_size)
        self._temperature, self._top_k = temperature, top_k

    def logprobs(
        self,
        tokens: Tensor,
        lengths: Tensor,
        prompt_lengths: Tensor,
        metadata: Sequence[Mapping[str, Any]],
    ) -> RemoteFuture[Tensor]:
        """float32 [B, S-1] of right-padded tokens int64 [B, S], lengths and prompt lengths int64
        [B]; entry t is of token t+1.

        With `top_k` [B, S-1, 2+2k], as `TaughtTokens` packs it, of k tokens, fewer where the policy
        knows no more. Zeros in the prompts and past a sequence's end. `metadata` is what the data
        says about each row's prompt, of which its task is told.
        """
        tasks = [{TASK: fields[TASK]} if TASK in fields else {} for fields in metadata]

        def logprobs() -> Tensor:
            parts = []
            # Numbered requests are computed alone, so that log-probs do not depend on who else
            # asks.
            for _, arrays in self._row_requests(tokens, lengths, 0, prompt_lengths, tasks):
                arrays["temperature"] = np.full(
                    (len(arrays["tokens"]), 1), self._temperature, dtype=np.float32
                )
                if self._top_k:
                    arrays["top_k"] = np.full((len(arrays["tokens"]), 1), self._top_k)
                parts.append(_told(self._infer(TEACHER_LOGPROBS, arrays)))
            return torch.cat([wide(part, tokens.shape[1] - 1) for part in parts])

        return self._future(self._parallel, logprobs)


def _told(answer: Mapping[str, NDArray]) -> Tensor:
    found = {name: torch.from_numpy(array.copy()) for name, array in answer.items()}
    if "top_ids" not in found:
        return found["logprobs"]
    outcomes = torch.cat([found["top_logprobs"], found["rest_logprobs"][..., None]], -1)
    return TaughtTokens(found["logprobs"], found["top_ids"], outcomes).packed()
