"""A tiny trainable value model: an embedding and a linear head; the ranks split the rows."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB_SIZE = 64
_WRITING_S = 0.2


class TinyValueModel:
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.version = 0
        self._writing: threading.Timer | None = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.embedding = torch.randn(VOCAB_SIZE, 8, requires_grad=True)
        self.head = torch.randn(8, requires_grad=True)

    def _sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _rows(self, batch: int) -> Tensor:
        return torch.arange(batch) % self.size == self.rank

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        mine = self._rows(len(tokens))
        values = torch.zeros(tokens.shape)
        with torch.no_grad():
            values[mine] = self.embedding[tokens[mine]] @ self.head
        return self._sum(values)

    def train(
        self, tokens: Tensor, returns: Tensor, old_values: Tensor, mask: Tensor
    ) -> dict[str, float]:
        mine = self._rows(len(tokens))
        predicted = (self.embedding[tokens[mine, :-1]] @ self.head).reshape(-1, returns.shape[1])
        loss = torch.where(mask[mine], (predicted - returns[mine]) ** 2, 0.0).sum() / mask.sum()
        total = float(self._sum(loss.detach().clone()))
        if not math.isfinite(total):
            return {"skipped": 1.0}
        parameters = (self.embedding, self.head)
        with torch.no_grad():
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter -= 0.1 * self._sum(gradient)
        self.version += 1
        return {"loss": total}

    def begin_save(self, directory: Path) -> None:
        """Copy the state; a timer writes the copy, and `finish_save` waits for it."""
        state = {
            "embedding": self.embedding,
            "head": self.head,
            "version": torch.tensor(self.version),
        }
        copy = {name: tensor.detach().clone() for name, tensor in state.items()}
        self._writing = threading.Timer(_WRITING_S, self._write, (directory, copy))
        self._writing.start()

    def _write(self, directory: Path, state: dict[str, Tensor]) -> None:
        if self.rank == 0:
            directory.mkdir(exist_ok=True)
            save_file(state, directory / "model.safetensors")

    def finish_save(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def load(self, directory: Path) -> None:
        state = load_file(directory / "model.safetensors")
        self.version = int(state["version"])
        with torch.no_grad():
            self.embedding.copy_(state["embedding"])
            self.head.copy_(state["head"])
