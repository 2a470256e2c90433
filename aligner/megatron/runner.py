"""One model on this rank: forward passes and updates through megatron-core's schedules."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from aligner.checks.actor import lora_problems
from aligner.data.collectives import broadcast_json
from aligner.data.types import Stats
from aligner.errors import AlignerError, ConfigError
from aligner.megatron.gpt_model import build_model, drop_last_graph, wrap_for_training
from aligner.megatron.lora import LoraWeights
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer import GuardedStep, ParameterGather, build_optimizer
from aligner.megatron.optimizer_state import OptimizerState
from aligner.megatron.packing import Cut, PackedBatch, pack_share
from aligner.megatron.world import World
from aligner.models import batch_invariant
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, frozen_names, weight_table
from aligner.schema import ActorConfig, CriticConfig, MegatronModelConfig, TrainedModelConfig

ReadOutput = Callable[[Tensor, PackedBatch], Tensor]
"""Model output [1, T, …] of a micro-batch to what is wanted of it."""
OutputLoss = Callable[[Tensor, PackedBatch], tuple[Tensor, Stats]]
"""Model output of a micro-batch to its part of the loss and of each statistic, both over global
denominators."""
_FP8_ROWS = 32
"""Tokens of an fp8 product on a rank are a multiple of it: the largest that any of
transformer-engine's recipes asks for."""


def offload(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Give up the parameters' memory on the device, gradient buffers' too, until the returned
    function is called.

    The storages themselves are emptied and filled again, so that whatever looks into them stays
    valid: megatron-core's parameter buffers, the distributed optimizer's shards, tied weights.
    Gradient buffers then hold anything.
    """
    parameters = list(parameters)
    weights = [(storage, _to_host(storage)) for storage in _storages(parameters)]
    buffers = _storages(getattr(parameter, "main_grad", None) for parameter in parameters)
    gradients = [(storage, storage.nbytes()) for storage in buffers]

    def restore() -> None:
        for storage, host in weights:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)
        for storage, size in gradients:
            storage.resize_(size)

    for storage in [storage for storage, _ in (*weights, *gradients)]:
        storage.resize_(0)
    return restore


def _storages(tensors: Iterable[Tensor | None]) -> Iterator[torch.UntypedStorage]:
    """Each storage once, however many of the tensors lie in it."""
    seen = set()
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _to_host(storage: torch.UntypedStorage) -> Tensor:
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_bytes(storage))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ModelRunner:
    """This rank's part of a model, and its optimizer when it is trained.

    Every rank of the world calls every method, with its own data rank's micro-batches.
    """

    def __init__(
        self,
        shape: ModelShape,
        world: World,
        head: Head,
        settings: MegatronModelConfig | TrainedModelConfig,
        total_steps: int = 1,
        *,
        exact: bool = False,
    ) -> None:
        """`exact` is `engine.exact`. Raises ConfigError where that cannot be had on this
        machine."""
        if exact:
            batch_invariant.require(shape)
        self.world, self.shape, self.head, self.settings = world, shape, head, settings
        self.chunks: list[GPTModel] = build_model(shape, world, head, settings, exact=exact)
        self.weights = self.trained = NamedWeights(
            self.chunks, shape, world, weight_table(shape, head)
        )
        if isinstance(settings, ActorConfig) and settings.lora.rank:
            if problems := list(lora_problems("actor", settings, shape)):
                raise ConfigError("\n".join(problems))
            self.weights = LoraWeights(self.chunks, shape, world, head, settings.lora, world.seed)
            self.trained = self.weights.adapters
        self._total_steps = total_steps
        layout = world.layout
        self._cut = Cut(
            sequence=layout.tensor if layout.sequence else 1,
            sequence_rank=world.place.tensor if layout.sequence else 0,
            context=layout.context,
            context_rank=world.place.context,
            context_group=parallel_state.get_context_parallel_group(),
            rows=batch_invariant.ROWS if exact else _FP8_ROWS if settings.precision == "fp8" else 1,
            tree=not exact and _attends_over_trees(shape, world),
        )
        self.updates = 0
        self.routes_differing = math.nan
        """Of the last pass with routes: the share of choices, in a layer each, that the router
        would have made otherwise."""
        self._restore: Callable[[], None] | None = None
        self._gather: ParameterGather | None = None

    def start_training(self) -> None:
        """Make gradient buffers and the optimizer, from the weights as they are now, but for those
        that stay frozen.

        Raises ConfigError, on every rank alike, where `frozen_names` does.
        """
        if not isinstance(self.settings, TrainedModelConfig):
            raise ValueError("this model was built without optimizer settings")
        optimizer = self.settings.optimizer
        frozen = frozen_names(self.weights.table, self.settings.frozen)
        for name in frozen.intersection(self.weights):
            self.weights.parameter(name).requires_grad_(False)
        self.ddp = wrap_for_training(self.chunks, optimizer)
        head_rate = (
            self.settings.head_learning_rate if isinstance(self.settings, CriticConfig) else None
        )
        self.optimizer, self.scheduler = build_optimizer(
            self.ddp, self.trained, optimizer, self._total_steps, head_rate
        )
        self.chunks[0].config.grad_scale_func = self.optimizer.scale_loss
        self._take_step = GuardedStep(
            self.optimizer, self.scheduler, optimizer, self.trained, self.world
        )
        if optimizer.overlap_param_gather:
            self._gather = ParameterGather(self.ddp)
            self.weights.finish_update = self.trained.finish_update = self._gather.finish

    def optimizer_state(self) -> OptimizerState:
        """Main weights, moments and momentum of what is trained."""
        return OptimizerState(self.optimizer, (parameter for _, parameter in self.parameters()))

    @contextlib.contextmanager
    def room_for_moments(self) -> Iterator[None]:
        """Take the device memory of moments and momentum meanwhile: they are made by the first
        update, after an engine has asked how much is free.
        """
        room = torch.empty(
            self.optimizer_state().missing_bytes, dtype=torch.uint8, device=self.world.device
        )
        try:
            yield
        finally:
            del room
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of every chunk, by a name of this rank's own."""
        self.weights.finish_update()
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter

    def share(
        self, tokens: Tensor, lengths: Tensor, group: int = 1, routes: Tensor | None = None
    ) -> list[PackedBatch]:
        """`pack_share` of a whole batch for this rank's data rank: int64 [B, S], int64 [B] and
        routes [B, S-1, L, K].

        Raises AlignerError for a sequence that is longer than the model's positions, and for routes
        of another model.
        """
        place, layout = self.world.place, self.world.layout
        longest = int(lengths.max())
        if longest > self.shape.max_positions:
            raise AlignerError(
                f"sequence {int(lengths.argmax())} of the batch has {longest} tokens, but the model"
                f" has {self.shape.max_positions} positions; shorten the prompts or the responses"
            )
        if routes is not None:
            self._check_routes(routes)
        return pack_share(
            tokens,
            lengths,
            data_rank=place.data,
            data_size=layout.data,
            budget=self.settings.micro_batch_tokens,
            device=self.world.device,
            cut=self._cut,
            # The interleaved schedule hands micro-batches from chunk to chunk in groups of as many
            # as there are stages.
            multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
            group=group,
            routes=routes,
        )

    def _check_routes(self, routes: Tensor) -> None:
        """Experts that are not there would fail on some rank alone, while the others wait for
        it."""
        shape = self.shape
        wanted, most = (
            (shape.num_layers, shape.experts_per_token),
            (int(routes.max()) if routes.numel() else 0),
        )
        if routes.shape[2:] != wanted or not 0 <= most < shape.num_experts:
            raise AlignerError(
                "expert routing replay: the recorded routing has (layers, experts per token)="
                f"{tuple(routes.shape[2:])} and expert ids up to {most}; the model has"
                f" (layers, experts per token)={wanted} and {shape.num_experts} experts"
            )

    def rows(
        self,
        tokens: Tensor,
        lengths: Tensor,
        width: int,
        read: ReadOutput,
        routes: Tensor | None = None,
    ) -> Tensor:
        """What `read` makes of each sequence, for the whole batch and on every rank: float32 [B,
        width].

        `read` gives [N, up to width] for a micro-batch of N sequences; what it does not fill is
        zero.
        """
        collected, batches = (
            torch.zeros(tokens.shape[0], width),
            self.share(tokens, lengths, routes=routes),
        )
        parts = self.forward(batches, read)
        if self.world.speaks_for_outputs:
            for batch, part in zip(batches, parts, strict=True):
                collected[batch.batch_rows, : part.shape[1]] = part.cpu()
        self._count_differing(batches)
        return self.world.sum_(collected)

    def _count_differing(self, batches: Sequence[PackedBatch]) -> None:
        passed = [batch.sequences.routes for batch in batches if batch.sequences.routes is not None]
        if not passed:
            return
        counts = [
            [float(sum(each.differing)), float(len(each.places) * len(each.differing))]
            for each in passed
        ]
        # What ranks have in common, and a pass that recomputes, counts several times, above and
        # below the line.
        differing, choices = self.world.sum_(
            torch.tensor(counts, dtype=torch.float64).sum(0)
        ).tolist()
        self.routes_differing = differing / max(choices, 1)

    def forward(self, batches: Sequence[PackedBatch], read: ReadOutput) -> list[Tensor]:
        """What `read` makes of each micro-batch's output, on last-stage ranks; an empty list
        elsewhere."""

        def step(
            iterator: Iterator[PackedBatch], model: Any
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(iterator)

            def result(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                wanted = output.new_zeros(0, 0) if batch.is_filler else read(output, batch)
                return output.new_zeros(()), _no_tokens(output), wanted

            return _apply(model, batch), result

        with torch.no_grad():
            return self._run_schedule(self.chunks, step, batches, forward_only=True)

    def update(self, batches: Sequence[PackedBatch], loss: OutputLoss) -> dict[str, float]:
        """One optimizer step on the micro-batches' summed losses; AlignerError when too many in a
        row are skipped.

        Returns on every rank what `GuardedStep` does, `skipped_total`, and the statistics over all
        data ranks (a name that ends in _max by maximum, others by sum); what is not finite in a
        skipped update is absent.
        """

        def step(
            iterator: Iterator[PackedBatch], model: Any
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(iterator)

            def scored(output: Tensor) -> tuple[Tensor, Tensor, Stats]:
                # A filler goes through the backward pass too: ranks meet in its collectives.
                value, stats = (
                    (self._no_loss(output), {}) if batch.is_filler else loss(output, batch)
                )
                return value, _no_tokens(output), stats

            return _apply(model, batch), scored

        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run_schedule(self.ddp, step, batches, forward_only=False)
        taken = self._take_step()
        if self._gather is not None and not taken["skipped"]:
            self._gather.start()
        self._count_differing(batches)
        self.updates += 1
        stats = self._reduce_stats(parts)
        if taken["skipped"]:
            stats = {name: value for name, value in stats.items() if math.isfinite(value)}
        # The schedule counts the updates that were applied.
        return stats | taken | {"skipped_total": float(self.updates - self.scheduler.num_steps)}

    def _run_schedule(
        self,
        chunks: Sequence[nn.Module],
        step: Any,
        batches: Sequence[PackedBatch],
        *,
        forward_only: bool,
    ) -> list[Any]:
        if self._restore is not None:
            raise RuntimeError("the model is asleep: its weights are in host memory")
        iterators = [iter(batches) for _ in chunks]
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=1,  # the true length travels with each micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
        )
        drop_last_graph(self.chunks)
        return results

    def _no_loss(self, output: Tensor) -> Tensor:
        """0, whose gradients are 0; they come to the head's weights too where the ranks wait for
        each while they add up."""
        head = (
            self.chunks[-1].output_layer.parameters()
            if self.ddp[-1].ddp_config.overlap_grad_reduce
            else ()
        )
        return output.sum() * 0 + sum(weight.sum() * 0 for weight in head if weight.requires_grad)

    def _reduce_stats(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        parts = [part for part in parts if part]
        names = broadcast_json(sorted(parts[0]) if parts else None, self.world.output_rank)
        is_max = torch.tensor([name.endswith("_max") for name in names])
        sums = torch.zeros(len(names), dtype=torch.float64)
        peaks = torch.full((len(names),), -torch.inf, dtype=torch.float64)
        if self.world.speaks_for_outputs and parts:
            table = torch.stack(
                [torch.stack([part[name].double().cpu() for name in names]) for part in parts]
            )
            sums, peaks = table.sum(0), table.amax(0)
        self.world.sum_(sums)
        self.world.max_(peaks)
        return dict(zip(names, torch.where(is_max, peaks, sums).tolist(), strict=True))

    def sleep(self) -> None:
        """Keep the weights in host memory and free the device's, until `wake`; nothing may use them
        in between."""
        if self._restore is None:
            self._restore = offload(parameter for _, parameter in self.parameters())

    def wake(self) -> None:
        """Bring the weights back to the device, as they were."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    @contextlib.contextmanager
    def swapped(self, other: Mapping[str, Tensor]) -> Iterator[None]:
        """Run with other weights, given by the names of `parameters`; the own ones come back at the
        end."""
        own = {name: parameter.data for name, parameter in self.parameters()}
        try:
            for name, parameter in self.parameters():
                parameter.data = other[name].to(parameter.device, non_blocking=True)
            yield
        finally:
            for name, parameter in self.parameters():
                parameter.data = own[name]

    def copy_of_weights(self, *, on_device: bool) -> dict[str, Tensor]:
        """This rank's weights by the names of `parameters`, where they are or, for a GPU to read
        fast, in host memory."""

        def copied(weight: Tensor) -> Tensor:
            if on_device:
                return weight.clone()
            return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda).copy_(
                weight
            )

        return {name: copied(parameter.detach()) for name, parameter in self.parameters()}


def _attends_over_trees(shape: ModelShape, world: World) -> bool:
    """Whether rows may share what they begin with: not where tokens are cut or hidden, or rows
    bring routes of their own."""
    on_cpu = world.device.type == "cpu"
    return (
        on_cpu
        and world.layout.context == 1
        and shape.sliding_window is None
        and not shape.num_experts
    )


def _apply(model: Any, batch: PackedBatch) -> Tensor:
    return model(batch.tokens, batch.positions, None, packed_seq_params=batch.sequences)


def _no_tokens(output: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int, device=output.device)
