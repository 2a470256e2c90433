"""`ModelRunner`: forward passes and optimizer steps of one model on this rank.

The module runs packed micro-batches through megatron-core's pipeline schedules. It also moves the
memory of parameters and gradient buffers between the device and the host.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from aligner.checks.actor import find_lora_problems
from aligner.data.collectives import broadcast_json
from aligner.data.types import Stats
from aligner.errors import AlignerError, ConfigError
from aligner.megatron.gpt_model import build_model, drop_last_graph, wrap_for_training
from aligner.megatron.kv_head_copies import mark_copies
from aligner.megatron.lora import LoraWeights
from aligner.megatron.named_weights import NamedWeights
from aligner.megatron.optimizer import GuardedStep, ParameterGather, build_optimizer
from aligner.megatron.optimizer_state import OptimizerState
from aligner.megatron.packing import PackedBatch, PackingLayout, pack_micro_batches
from aligner.megatron.world import World
from aligner.models import batch_invariant
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import Head, frozen_names, weight_table
from aligner.schema import ActorConfig, CriticConfig, MegatronModelConfig, TrainedModelConfig

OutputReader = Callable[[Tensor, PackedBatch], Tensor]
"""Function that computes a result [N, …] from the model output [1, T, …] of a micro-batch."""
OutputLoss = Callable[[Tensor, PackedBatch], tuple[Tensor, Stats]]
"""Function that computes a micro-batch's part of the loss and of each statistic from its model
output [1, T, …]. Both are sums divided by global denominators, so the parts of all micro-batches
add up.
"""

# fp8 GEMMs need a token count per rank that is a multiple of this number: the largest alignment
# that any of transformer-engine's recipes requires.
_FP8_TOKEN_MULTIPLE = 32


def offload(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Move parameters to host memory and free their storages on the device.

    The storages of the gradient buffers are freed too, and their contents are lost. The same
    storages are filled again later, so all tensors that refer to them stay valid: megatron-core's
    DDP buckets, the shards of the distributed optimizer, tied weights.

    Returns:
        A function that restores the parameters; until it is called, nothing may use them.
    """
    parameters = list(parameters)
    weights = [(storage, _copy_to_host(storage)) for storage in _unique_storages(parameters)]
    buffers = _unique_storages(getattr(parameter, "main_grad", None) for parameter in parameters)
    gradients = [(storage, storage.nbytes()) for storage in buffers]

    def restore() -> None:
        for storage, host in weights:
            storage.resize_(host.numel())
            _as_bytes(storage).copy_(host)
        for storage, size in gradients:
            storage.resize_(size)

    for storage in [storage for storage, _ in (*weights, *gradients)]:
        storage.resize_(0)
    return restore


def _unique_storages(tensors: Iterable[Tensor | None]) -> Iterator[torch.UntypedStorage]:
    """Yield each storage of the tensors once."""
    seen = set()
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _copy_to_host(storage: torch.UntypedStorage) -> Tensor:
    """Return a copy of the storage in host memory, uint8 [bytes]; pinned if it is on a GPU."""
    on_gpu = storage.device.type == "cuda"
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
    return host.copy_(_as_bytes(storage))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a view of the storage, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ModelRunner:
    """This rank's part of a model and, if the model is trained, of its optimizer.

    `Policy`, `FrozenPolicy` and `ValueModel` use it. Methods are SPMD: every rank of the world must
    call them, with the same whole batch or with the micro-batches of its own data rank.
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
        """Build this rank's part of the model, without loading its weights.

        Args:
            shape: Dimensions of the model.
            world: This rank's view of the role's ranks.
            head: Vocabulary head or scalar head.
            settings: Configuration section of the model.
            total_steps: Number of optimizer steps of the learning-rate schedule.
            exact: `engine.exact`: use batch-invariant kernels.

        Raises:
            ConfigError: If this machine has no batch-invariant kernels for the model, or if the
                LoRA settings do not fit the model.
        """
        if exact:
            batch_invariant.require_batch_invariance(shape)
        self.world = world
        self.shape = shape
        self.head = head
        self.settings = settings
        self.chunks: list[GPTModel] = build_model(shape, world, head, settings, exact=exact)
        self.weights = self.trained_weights = NamedWeights(
            self.chunks, shape, world, weight_table(shape, head)
        )
        if isinstance(settings, ActorConfig) and settings.lora.rank:
            if problems := list(find_lora_problems("actor", settings, shape)):
                raise ConfigError("\n".join(problems))
            self.weights = LoraWeights(self.chunks, shape, world, head, settings.lora, world.seed)
            self.trained_weights = self.weights.adapters
        mark_copies(self.trained_weights)
        self._total_steps = total_steps
        layout = world.layout
        self._packing_layout = PackingLayout(
            sequence_size=layout.tensor if layout.sequence else 1,
            sequence_rank=world.coordinates.tensor if layout.sequence else 0,
            context_size=layout.context,
            context_rank=world.coordinates.context,
            context_group=parallel_state.get_context_parallel_group(),
            token_multiple=(
                batch_invariant.ROWS
                if exact
                else _FP8_TOKEN_MULTIPLE
                if settings.precision == "fp8"
                else 1
            ),
            should_share_prefixes=not exact and _supports_shared_prefixes(shape, world),
        )
        self.updates = 0
        self.routing_mismatch = math.nan
        """Fraction of the (token, layer) pairs for which the router would not have chosen the
        recorded experts, in the last pass with routing replay; NaN before the first such pass."""
        self._restore: Callable[[], None] | None = None
        self._gather: ParameterGather | None = None

    def start_training(self) -> None:
        """Create megatron-core's DDP gradient buckets and the optimizer from the current weights.

        Frozen weights get neither a gradient buffer nor an optimizer state. Collective.

        Raises:
            ConfigError: If `frozen_names` raises it; on every rank.
            ValueError: If the model was built without optimizer settings.
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
            self.ddp, self.trained_weights, optimizer, self._total_steps, head_rate
        )
        # The schedules apply this function to the loss before the backward pass.
        self.chunks[0].config.grad_scale_func = self.optimizer.scale_loss
        self._guarded_step = GuardedStep(
            self.optimizer, self.scheduler, optimizer, self.trained_weights, self.world
        )
        if optimizer.overlap_param_gather:
            self._gather = ParameterGather(self.ddp)
            # Each read of weights by name first waits for the parameter all-gathers.
            self.weights.finish_update = self._gather.finish
            self.trained_weights.finish_update = self._gather.finish

    def optimizer_state(self) -> OptimizerState:
        """Return the main weights, and the moments or momentum, of the trained parameters."""
        return OptimizerState(self.optimizer, (parameter for _, parameter in self.parameters()))

    @contextlib.contextmanager
    def reserve_optimizer_memory(self) -> Iterator[None]:
        """Occupy the device memory of the optimizer state while the context is active.

        The first update allocates the moments or momentum. Without this reservation, a colocated
        engine that measures the free memory before that update would take this memory.
        """
        reserved = torch.empty(
            self.optimizer_state().unallocated_bytes, dtype=torch.uint8, device=self.world.device
        )
        try:
            yield
        finally:
            del reserved
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter of every model chunk, with a name that is unique on this rank."""
        self.weights.finish_update()
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter

    def pack(
        self,
        tokens: Tensor,
        lengths: Tensor,
        group_size: int = 1,
        expert_routing: Tensor | None = None,
    ) -> list[PackedBatch]:
        """Return the packed micro-batches of this rank's data rank; see `pack_micro_batches`.

        Args:
            tokens: Right-padded rows of the whole batch, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].
            group_size: Number of consecutive rows that must be in one micro-batch.
            expert_routing: Recorded expert routing, uint8 or int16 [B, S-1, L, K].

        Raises:
            AlignerError: If a sequence is longer than the model's positions, or if the routing was
                recorded with another model.
        """
        coordinates = self.world.coordinates
        layout = self.world.layout
        longest = int(lengths.max())
        if longest > self.shape.max_positions:
            raise AlignerError(
                f"sequence {int(lengths.argmax())} of the batch has {longest} tokens, but the model"
                f" has {self.shape.max_positions} positions; shorten the prompts or the responses"
            )
        if expert_routing is not None:
            self._check_expert_routing(expert_routing)
        return pack_micro_batches(
            tokens,
            lengths,
            data_rank=coordinates.data,
            data_size=layout.data,
            budget=self.settings.micro_batch_tokens,
            device=self.world.device,
            layout=self._packing_layout,
            # megatron-core's interleaved schedule passes micro-batches between chunks in groups
            # whose size is the number of pipeline stages.
            multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
            group_size=group_size,
            expert_routing=expert_routing,
        )

    def _check_expert_routing(self, expert_routing: Tensor) -> None:
        """Raise AlignerError if the routing [B, S-1, L, K] was recorded with another model.

        Every rank checks the whole batch. Otherwise, an unknown expert would raise an error on one
        rank only, while the other ranks wait in a collective.
        """
        experts = self.shape.experts
        assert experts is not None
        expected = (len(self.shape.expert_layers), experts.per_token)
        max_expert = int(expert_routing.max()) if expert_routing.numel() else 0
        if expert_routing.shape[2:] != expected or not 0 <= max_expert < experts.count:
            raise AlignerError(
                "expert routing replay: the recorded routing has (layers with experts, experts per"
                " token)="
                f"{tuple(expert_routing.shape[2:])} and expert ids up to {max_expert}; the model"
                f" has (layers with experts, experts per token)={expected} and {experts.count}"
                " experts"
            )

    def compute_rows(
        self,
        tokens: Tensor,
        lengths: Tensor,
        width: int,
        read_output: OutputReader,
        expert_routing: Tensor | None = None,
    ) -> Tensor:
        """Return a result for each sequence of the whole batch, on every rank. Collective.

        Args:
            tokens: Right-padded rows of the whole batch, int64 [B, S].
            lengths: Lengths of the rows in tokens, int64 [B].
            width: Number of values of a row of the result.
            read_output: Function that returns the results [N, up to `width`] of a micro-batch of N
                sequences.
            expert_routing: Recorded expert routing, uint8 or int16 [B, S-1, L, K].

        Returns:
            float32 [B, width] in host memory; values that `read_output` does not return are zero.
        """
        collected = torch.zeros(tokens.shape[0], width)
        batches = self.pack(tokens, lengths, expert_routing=expert_routing)
        parts = self.forward(batches, read_output)
        # The outputs are equal on the tensor and context ranks, so only one of these ranks
        # contributes its outputs.
        if self.world.is_output_rank:
            for batch, part in zip(batches, parts, strict=True):
                collected[batch.batch_rows, : part.shape[1]] = part.cpu()
        self._measure_routing_mismatch(batches)
        # Each row is nonzero on one rank only, so the all-reduce assembles the whole batch.
        return self.world.all_reduce_sum(collected)

    def _measure_routing_mismatch(self, batches: Sequence[PackedBatch]) -> None:
        """Update `routing_mismatch` from the micro-batches of a pass with routing replay."""
        replays = [
            batch.sequences.routing_replay
            for batch in batches
            if batch.sequences.routing_replay is not None
        ]
        if not replays:
            return
        counts = [
            [
                float(sum(replay.mismatch_counts)),
                float(len(replay.token_index) * len(replay.mismatch_counts)),
            ]
            for replay in replays
        ]
        # Several ranks count the same tokens, and activation recomputation counts a layer twice.
        # Both affect numerator and denominator alike.
        mismatches, choices = self.world.all_reduce_sum(
            torch.tensor(counts, dtype=torch.float64).sum(0)
        ).tolist()
        self.routing_mismatch = mismatches / max(choices, 1)

    def forward(self, batches: Sequence[PackedBatch], read_output: OutputReader) -> list[Tensor]:
        """Run the micro-batches without gradients and return the result of `read_output` for each.

        Ranks of other pipeline stages than the last return an empty list. For a filler, the result
        is an empty tensor [0, 0].
        """

        def forward_step(
            iterator: Iterator[PackedBatch], model: Any
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            """Run the model on a micro-batch; return its output and the function that reads it."""
            batch = next(iterator)

            def loss_func(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                """Return a loss of zero, a token count of zero and the result of `read_output`."""
                result = output.new_zeros(0, 0) if batch.is_filler else read_output(output, batch)
                return output.new_zeros(()), _zero_token_count(output), result

            return _apply_model(model, batch), loss_func

        with torch.no_grad():
            return self._run_schedule(self.chunks, forward_step, batches, forward_only=True)

    def update(self, batches: Sequence[PackedBatch], loss: OutputLoss) -> dict[str, float]:
        """Take one optimizer step on the sum of the micro-batches' losses.

        Returns:
            On every rank: the results of `GuardedStep`; `skipped_total`; and the statistics of the
            loss over all data ranks. Statistics whose names end with _max are combined by their
            maximum, the other statistics by their sum. If the update was skipped, statistics that
            are not finite are absent.

        Raises:
            AlignerError: If too many consecutive updates were skipped.
        """

        def forward_step(
            iterator: Iterator[PackedBatch], model: Any
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            """Run the model on a micro-batch; return its output and the loss function."""
            batch = next(iterator)

            def loss_func(output: Tensor) -> tuple[Tensor, Tensor, Stats]:
                """Return the loss, a token count of zero and the statistics."""
                # A filler runs the backward pass too, because the ranks take part in its
                # collectives.
                value, stats = (
                    (self._zero_loss(output), {}) if batch.is_filler else loss(output, batch)
                )
                return value, _zero_token_count(output), stats

            return _apply_model(model, batch), loss_func

        # DDP's hooks add the gradients of all micro-batches to persistent buffers.
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run_schedule(self.ddp, forward_step, batches, forward_only=False)
        step_stats = self._guarded_step()
        # A skipped step has not changed any weight, so there is nothing to gather.
        if self._gather is not None and not step_stats["skipped"]:
            self._gather.start()
        self._measure_routing_mismatch(batches)
        self.updates += 1
        stats = self._reduce_stats(parts)
        if step_stats["skipped"]:
            stats = {name: value for name, value in stats.items() if math.isfinite(value)}
        # The learning-rate scheduler counts the updates that were applied.
        skipped_total = float(self.updates - self.scheduler.num_steps)
        return stats | step_stats | {"skipped_total": skipped_total}

    def _run_schedule(
        self,
        chunks: Sequence[nn.Module],
        forward_step: Any,
        batches: Sequence[PackedBatch],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run micro-batches through megatron-core's schedule for the world's pipeline layout.

        megatron-core chooses between the schedules without pipelining, 1F1B, and interleaved 1F1B.

        Returns:
            The third result of the loss function for each micro-batch, on ranks of the last
            pipeline stage; an empty list elsewhere.
        """
        if self._restore is not None:
            raise RuntimeError("the model is asleep: its weights are in host memory")
        iterators = [iter(batches) for _ in chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks),
            num_microbatches=len(batches),
            # With `variable_seq_lengths`, the stages exchange the true shape of each micro-batch.
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        drop_last_graph(self.chunks)
        return results

    def _zero_loss(self, output: Tensor) -> Tensor:
        """Return a loss of 0, whose gradients are 0, as a scalar in the dtype of the output.

        With `overlap_grad_reduce`, DDP starts the reduction of a bucket only after each of its
        parameters has received a gradient. The loss then also depends on the head's weights.
        """
        head = (
            self.chunks[-1].output_layer.parameters()
            if self.ddp[-1].ddp_config.overlap_grad_reduce
            else ()
        )
        return output.sum() * 0 + sum(weight.sum() * 0 for weight in head if weight.requires_grad)

    def _reduce_stats(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the statistics over all micro-batches and data ranks, on every rank. Collective.

        Args:
            parts: Statistics of each micro-batch of this rank, scalars; empty for fillers.
        """
        parts = [part for part in parts if part]
        # Data rank 0 always has a sequence, so the first output rank has all names.
        names = broadcast_json(sorted(parts[0]) if parts else None, self.world.first_output_rank)
        is_max = torch.tensor([name.endswith("_max") for name in names])
        sums = torch.zeros(len(names), dtype=torch.float64)
        maxima = torch.full((len(names),), -torch.inf, dtype=torch.float64)
        if self.world.is_output_rank and parts:
            table = torch.stack(
                [torch.stack([part[name].double().cpu() for name in names]) for part in parts]
            )
            sums = table.sum(0)
            maxima = table.amax(0)
        self.world.all_reduce_sum(sums)
        self.world.all_reduce_max(maxima)
        return dict(zip(names, torch.where(is_max, maxima, sums).tolist(), strict=True))

    def sleep(self) -> None:
        """Move the weights to host memory and free their device memory until `wake`.

        Nothing may use the weights between `sleep` and `wake`.
        """
        if self._restore is None:
            self._restore = offload(parameter for _, parameter in self.parameters())

    def wake(self) -> None:
        """Restore the weights on the device after `sleep`."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    @contextlib.contextmanager
    def swap_weights(self, other: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the weights while the context is active, and restore them at its end.

        Args:
            other: Replacement weights by the names that `parameters` yields, in host or device
                memory.
        """
        own = {name: parameter.data for name, parameter in self.parameters()}
        try:
            for name, parameter in self.parameters():
                parameter.data = other[name].to(parameter.device, non_blocking=True)
            yield
        finally:
            for name, parameter in self.parameters():
                parameter.data = own[name]

    def copy_weights(self, *, on_device: bool) -> dict[str, Tensor]:
        """Return a copy of this rank's weights by the names that `parameters` yields.

        Args:
            on_device: Whether to store the copy on the device. Otherwise the copy is in host
                memory, which is pinned for fast transfers if the weights are on a GPU.
        """

        def copy_weight(weight: Tensor) -> Tensor:
            if on_device:
                return weight.clone()
            return torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda).copy_(
                weight
            )

        return {name: copy_weight(parameter.detach()) for name, parameter in self.parameters()}


def _supports_shared_prefixes(shape: ModelShape, world: World) -> bool:
    """Return whether rows may share prefixes.

    Attention over prefix trees exists on CPUs only. It supports neither context parallelism nor
    sliding windows, soft caps, sinks and delta nets. Experts are excluded, because each row has its
    own recorded routing.
    """
    on_cpu = world.device.type == "cpu"
    has_plain_attention = shape.has_plain_scores and not shape.has_windows
    return (
        on_cpu
        and world.layout.context == 1
        and has_plain_attention
        and not shape.num_experts
        and shape.delta_net is None
    )


def _apply_model(model: Any, batch: PackedBatch) -> Tensor:
    return model(batch.tokens, batch.positions, None, packed_seq_params=batch.sequences)


def _zero_token_count(output: Tensor) -> Tensor:
    """Return 0 as the number of tokens that megatron-core's schedules expect from a loss function.

    The losses are sums divided by global denominators, so megatron-core must not normalize by
    tokens.
    """
    return torch.zeros((), dtype=torch.int, device=output.device)
