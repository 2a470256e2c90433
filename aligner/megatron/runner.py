"""One model on this rank: forward passes and updates through megatron-core's schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from aligner.config.model_shape import ModelShape
from aligner.config.schema import Optimizer
from aligner.data.collectives import broadcast_json
from aligner.megatron.model import Head, build_model, wrap_for_training
from aligner.megatron.optimizer import build_optimizer
from aligner.megatron.packing import PackedBatch, pack_share
from aligner.megatron.weights import NamedWeights
from aligner.megatron.world import World

Stats = dict[str, Tensor]
# Model output [1, T, …] of a micro-batch to what is wanted of it.
ReadOutput = Callable[[Tensor, PackedBatch], Tensor]
# Model output of a micro-batch to its part of the loss and of each statistic, both over global denominators.
OutputLoss = Callable[[Tensor, PackedBatch], tuple[Tensor, Stats]]


class ModelRunner:
    """This rank's part of a model, and its optimizer when it is trained.

    Every rank of the world calls every method, with its own data rank's micro-batches.
    """

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        head: Head,
        micro_batch_tokens: int,
        optimizer: Optimizer | None = None,
        total_steps: int = 1,
    ) -> None:
        self.world = world
        self._budget = micro_batch_tokens
        # A GPU computes in bf16 around fp32 main weights; a CPU has no fast bf16 product.
        self.dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        self.model: GPTModel = build_model(shape, world, head, self.dtype)
        self.weights = NamedWeights(self.model, shape, world, with_head=head == "vocabulary")
        self._settings, self._total_steps = optimizer, total_steps
        self.updates = 0

    def start_training(self) -> None:
        """Make gradient buffers and the optimizer, from the weights as they are now."""
        if self._settings is None:
            raise ValueError("this model was built without optimizer settings")
        self.ddp = wrap_for_training(self.model)
        self.optimizer, self.scheduler = build_optimizer(self.ddp, self._settings, self._total_steps)
        self.model.config.grad_scale_func = self.optimizer.scale_loss

    def share(self, tokens: Tensor, lengths: Tensor) -> list[PackedBatch]:
        """The micro-batches of this rank's data rank, of a whole batch: tokens int64 [B, S], lengths int64 [B]."""
        place, layout = self.world.place, self.world.layout
        return pack_share(
            tokens, lengths, data_rank=place.data, data_size=layout.data, budget=self._budget, device=self.world.device
        )

    def rows(self, tokens: Tensor, lengths: Tensor, width: int, read: ReadOutput) -> Tensor:
        """What `read` makes of each sequence, for the whole batch and on every rank: float32 [B, width].

        `read` gives [N, up to width] for a micro-batch of N sequences; what it does not fill is zero.
        """
        collected = torch.zeros(tokens.shape[0], width)
        batches = self.share(tokens, lengths)
        parts = self.forward(batches, read)
        if self.world.speaks_for_outputs:
            for batch, part in zip(batches, parts, strict=True):
                collected[batch.batch_rows, : part.shape[1]] = part.cpu()
        return self.world.sum_(collected)

    def forward(self, batches: Sequence[PackedBatch], read: ReadOutput) -> list[Tensor]:
        """What `read` makes of each micro-batch's output, on last-stage ranks; an empty list elsewhere."""

        def step(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(iterator)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=output.device), read(output, batch)

            return _apply(model, batch), loss

        with torch.no_grad():
            return self._run_schedule(self.model, step, batches, forward_only=True)

    def update(self, batches: Sequence[PackedBatch], loss: OutputLoss) -> dict[str, float]:
        """One optimizer step on the micro-batches' summed losses.

        Returns on every rank the statistics over all data ranks (a name that ends in _max by maximum, others by sum),
        and `grad_norm` (before clipping) and `lr` (that of this step).
        """

        def step(iterator: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(iterator)

            def scored(output: Tensor) -> tuple[Tensor, Tensor, Stats]:
                value, stats = loss(output, batch)
                return value, torch.zeros((), dtype=torch.int, device=output.device), stats

            return _apply(model, batch), scored

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run_schedule(self.ddp, step, batches, forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=1)
        self.updates += 1
        stats = self._reduce_stats(parts)
        return stats | {"grad_norm": float(grad_norm or 0.0), "lr": float(learning_rate)}

    def _run_schedule(self, model: Any, step: Any, batches: Sequence[PackedBatch], *, forward_only: bool) -> list[Any]:
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,  # the true length travels with each micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _reduce_stats(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        names = broadcast_json(sorted(parts[0]) if parts else None, self.world.output_rank)
        is_max = torch.tensor([name.endswith("_max") for name in names])
        sums = torch.zeros(len(names), dtype=torch.float64)
        peaks = torch.full((len(names),), -torch.inf, dtype=torch.float64)
        if self.world.speaks_for_outputs:
            table = torch.stack([torch.stack([part[name].double().cpu() for name in names]) for part in parts])
            sums, peaks = table.sum(0), table.amax(0)
        self.world.sum_(sums)
        self.world.max_(peaks)
        return dict(zip(names, torch.where(is_max, peaks, sums).tolist(), strict=True))

    @contextlib.contextmanager
    def swapped(self, other: Mapping[str, Tensor]) -> Iterator[None]:
        """Run with other weights, given by parameter name on the host; the own ones come back at the end."""
        own = {name: parameter.data for name, parameter in self.model.named_parameters()}
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = other[name].to(parameter.device)
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.data = own[name]

    def host_copy(self) -> dict[str, Tensor]:
        """A copy of this rank's weights in host memory, by parameter name."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.model.named_parameters()}


def _apply(model: Any, batch: PackedBatch) -> Tensor:
    return model(batch.tokens, batch.positions, None, packed_seq_params=batch.sequences)
