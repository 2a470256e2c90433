"""The embedded generation engine: a decoder in plain PyTorch that runs on every device that the
trainer supports."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.data.collectives import broadcast_json
from aligner.engines.embedded.cache import Cache, CacheSize, fit
from aligner.engines.embedded.decoded_response import DecodedResponse
from aligner.engines.embedded.decoder import Decoder, Prompts, Step
from aligner.engines.embedded.engine_machine import Machine
from aligner.engines.embedded.engine_weights import EmbeddedUpdate, EngineWeights, parameters
from aligner.engines.embedded.graphs import GraphedForward
from aligner.engines.embedded.scheduler import Scheduler
from aligner.engines.embedded.sliced_attention import can_slice
from aligner.engines.engine_protocol import (
    EngineRequest,
    GenerationEngine,
    RequestKey,
    SamplingOptions,
    SpanListener,
    weight_format,
)
from aligner.errors import AlignerError, ConfigError
from aligner.models import batch_invariant
from aligner.models.layouts import cache_bytes_per_token, engine_problems
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

# On GPUs the number of columns of the KV cache is a multiple of this, so that batches of similar
# lengths replay the same CUDA graphs.
_COLUMN_BLOCK = 64
# Maximum number of prompt tokens in one forward pass of `next_logits`, padded to the longest
# prompt.
_PASS_TOKENS = 8192
# Default of `engine.steps_per_sync` on GPUs: each step then bears an eighth of the host's work
# between two synchronizations.
_STEPS_ON_GPUS = 8


class EmbeddedEngine(GenerationEngine):
    """A `GenerationEngine` for every model family that aligner can train.

    A sample's random numbers depend only on the seed, the prompt id and the sample index. Its
    logits depend on the rest of the batch only through the rounding of matmuls; with
    `engine.exact`, they do not depend on it at all.
    """

    def __init__(
        self,
        shape: ModelShape,
        settings: EngineConfig,
        rank: int,
        seed: int,
        group: ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        shared: Mapping[str, Tensor] | None = None,
        listener: SpanListener | None = None,
    ) -> None:
        """Build one of the engine's TP' x DP' ranks, without weights.

        Args:
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            rank: Rank of this process in the engine.
            seed: Seed of the random streams.
            group: The TP' ranks of this replica, in order; None if TP' is 1.
            device: Device of this rank.
            shared: Parameters of the trainer, by megatron-core's names, that this rank uses
                instead of allocating its own (`engine.update=shared`).
            listener: Called with `prefill` after each step that prefills prompts.

        Raises:
            ConfigError: The model cannot be divided into this layout, or `group` is missing, or the
                kernels are not batch-invariant on this machine (`engine.exact`).
        """
        tensor = settings.parallel.tensor
        if problems := list(engine_problems(settings.parallel, shape)):
            raise ConfigError("\n".join(problems))
        if tensor > 1 and group is None:
            raise ConfigError(
                f"engine.parallel.tensor={tensor}: requires the process group of the replica's"
                " ranks, got None"
            )
        if settings.exact:
            batch_invariant.require_batch_invariance(shape)
        super().__init__(shape, settings, weight_format(settings, device))
        self._device = torch.device(device)
        self._shared = shared
        self._dtype = self.weight_format.dtype
        self._layout = parameters(shape, tensor, rank % tensor)

        is_sliced = can_slice(shape, self._device, self._dtype) and not settings.exact
        decoder_options = {
            "exact": settings.exact,
            "packed": settings.packed_weights,
            "sliced": is_sliced,
        }
        decoder = Decoder(shape, tensor, rank % tensor, group, self._device, **decoder_options)
        cache = Cache(shape, tensor, self._device, self._dtype, by_token=is_sliced)

        # In a mixture-of-experts model, the experts that a step runs depend on its tokens, so that
        # the next step cannot replay a recorded graph.
        uses_graphs = settings.cuda_graphs and self._device.type == "cuda" and not shape.num_experts
        self._graphs = GraphedForward(decoder) if uses_graphs else None
        forward = self._graphs.forward if self._graphs else decoder.forward

        steps = settings.steps_per_sync or (_STEPS_ON_GPUS if self._device.type == "cuda" else 1)
        self._machine = Machine(
            decoder,
            cache,
            forward,
            self._device,
            listener=listener,
            speculation=settings.speculation,
            steps_per_sync=steps,
        )
        self._token_bytes = cache_bytes_per_token(shape, tensor, self._dtype.itemsize)
        self._group = group
        self._is_first = rank % tensor == 0
        self._turn_message: Any = None
        """Message of rank 0's `end_turn`, on the replica's other ranks."""
        self._scheduler = Scheduler(self._machine, seed)
        self._is_reserved = False
        """Whether the KV cache has the size that the last call of `reserve` requested."""
        self._released: list[tuple[int, int]] = []
        """Samples whose resident rows the other ranks have not freed yet."""
        self._spare: EngineWeights | None = None
        """Second set of weights. An atomic update writes to it, and its commit swaps the two sets.
        """
        self._weights = self._allocate()

    @property
    def version(self) -> int | None:
        """Version of the current weights; see `GenerationEngine.version`."""
        return self._machine.version

    @property
    def leads(self) -> bool:
        """See `GenerationEngine.leads`."""
        return self._is_first

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._arrivals) or self._scheduler.has_work

    def reserve(self, sequences: int, tokens: int) -> None:
        """Allocate a KV cache for `sequences` sequences of at most `tokens` tokens.

        `engine.batch_size` and `engine.kv_cache_mib` limit its size. Raises AlignerError if not
        even one sequence fits.
        """
        self._command("reserve", sequences=sequences, tokens=tokens)
        self._reserve(sequences, tokens)

    def step(self) -> None:
        """See `GenerationEngine.step`."""
        arrivals = self._take_arrivals()
        released = self._released
        self._released = []
        if self._group is not None:
            requests = [_to_json(request) for request in arrivals]
            self._command("step", requests=requests, released=released)
        self._check_awake("generate")
        self._execute_step(arrivals)

    def interrupt(self) -> None:
        """See `GenerationEngine.interrupt`."""
        for response in self._stop_requests():
            response.request.resolve(response.completion())

    def fail_all(self, error: Exception) -> None:
        """Drop all queued requests and requests in flight; their callers receive the error."""
        for response in self._stop_requests():
            response.request.fail(error)

    def _stop_requests(self) -> list[DecodedResponse]:
        """Remove all queued requests and requests in flight, and return them as they are."""
        self._scheduler.queue(self._take_arrivals())
        self._command("interrupt")
        return self._scheduler.interrupt()

    def release(self, prompt_id: int, sample_index: int) -> None:
        """See `GenerationEngine.release`."""
        self._scheduler.release(prompt_id, sample_index)
        if self._group is not None:
            self._released.append((prompt_id, sample_index))

    def _reserve(self, sequences: int, tokens: int) -> None:
        self._resize_cache(sequences, tokens)
        self._is_reserved = True

    def follow(self) -> None:
        """Execute the steps of the replica's rank 0; see `GenerationEngine.follow`."""
        while (command := broadcast_json(None, group=self._group))["do"] != "end_turn":
            # Rank 0 executes the same command, raises the same error, and reports it.
            with contextlib.suppress(AlignerError):
                self._execute(command)
        self._turn_message = command["message"]

    def end_turn(self, message: Any = None) -> Any:
        """See `GenerationEngine.end_turn`."""
        if self._group is None:
            return message
        if self._is_first:
            self._command("end_turn", message=message)
            return message
        return self._turn_message

    def _command(self, name: str, **arguments: Any) -> None:
        """Send a command to the replica's other ranks; the caller executes it next."""
        if self._group is not None:
            broadcast_json({"do": name, **arguments}, group=self._group)

    def _execute(self, command: dict[str, Any]) -> None:
        if command["do"] == "reserve":
            self._reserve(command["sequences"], command["tokens"])
        elif command["do"] == "interrupt":
            self._scheduler.interrupt()
        else:
            for prompt_id, sample_index in command["released"]:
                self._scheduler.release(prompt_id, sample_index)
            self._execute_step([_from_json(request) for request in command["requests"]])

    def _execute_step(self, arrivals: Sequence[EngineRequest]) -> None:
        self._scheduler.queue(arrivals)
        self._make_room(self._scheduler.next_batch())
        self._scheduler.join_batch()
        for response in self._scheduler.step():
            response.request.resolve(response.completion())

    def _make_room(self, requests: Sequence[EngineRequest]) -> None:
        """Enlarge the KV cache for the requests of a new batch if it is too small.

        More rows are allocated only if the size was not set by `reserve`. A request that would not
        fit even into an empty cache fails.
        """
        size = self._machine.cache.size
        longest = 0
        count = 0
        for request in requests:
            try:
                self._fitting_size(1, request.total_tokens)
            except AlignerError as error:
                self._scheduler.drop(request)
                request.fail(error)
                continue
            # The last token of a sequence is never run, so it needs no column.
            longest = max(longest, request.total_tokens - 1)
            count += 1

        rows = min(count, self._settings.batch_size)
        if longest > size.columns or (rows > size.rows and not self._is_reserved):
            self._resize_cache(max(count, size.rows), max(longest, size.columns) + 1)
            self._is_reserved = False

    def _unsupported(self, request: EngineRequest) -> str | None:
        length = request.total_tokens
        if length <= self._shape.max_positions:
            return None
        return (
            f"prompt {request.key.prompt_id}: input and completion have up to {length} tokens, but"
            f" the model has {self._shape.max_positions} positions"
        )

    def next_logits(self, prompts: Sequence[Tensor]) -> Tensor:
        """Return the logits of the token after each prompt.

        May be called only if the replica has one rank.

        Args:
            prompts: Token ids of N prompts, int64 [P] each.

        Returns:
            float32 [N, V] on the host.

        Raises:
            AlignerError: The prompts do not fit into the KV cache, the engine sleeps or has no
                weights, or requests are in flight.
        """
        self._check_awake("generate")
        self._check_weights()
        if self.has_work:
            raise AlignerError("the engine is generating; wait until its requests are complete")
        self.reserve(len(prompts), 1 + max(map(len, prompts)))

        chunk_logits = []
        machine = self._machine
        empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        rows = max(1, min(machine.cache.size.rows, _PASS_TOKENS // max(map(len, prompts))))
        for first in range(0, len(prompts), rows):
            chunk = prompts[first : first + rows]
            lengths = torch.tensor([len(tokens) for tokens in chunk], device=self._device)
            copies = torch.arange(len(chunk), device=self._device)
            row_indices = list(range(len(chunk)))
            prefill = Prompts(
                torch.cat(list(chunk)).to(self._device),
                lengths,
                int(lengths.max()),
                copies,
                row_indices,
            )
            with torch.inference_mode():
                logits = machine.decoder.gather_logits(
                    machine.forward(Step(empty, empty, 1, prefill), machine.cache)
                )
            assert logits is not None
            chunk_logits.append(logits.float().cpu())
        return torch.cat(chunk_logits)

    def take_guesses(self) -> tuple[int, int]:
        """See `GenerationEngine.take_guesses`. Draft tokens after a rejected one count too."""
        machine = self._machine
        guessed = machine.guessed
        accepted = machine.accepted
        machine.guessed = 0
        machine.accepted = 0
        return guessed, accepted

    def begin_update(self, version: int) -> EmbeddedUpdate:
        """See `GenerationEngine.begin_update`."""
        self._check_may_update(version)
        target = self._weights
        # An atomic update writes to the spare weights. If there are no current weights to preserve,
        # it writes in place.
        if self._settings.update == "atomic" and self.version is not None:
            if self._spare is None:
                self._spare = EngineWeights(self._layout, self._device, self._dtype)
            target = self._spare
            # The update has only the elements that differ from the current weights.
            if self._settings.publish == "changes":
                target.storage.copy_(self._weights.storage)
        elif self.version is not None:
            self._settle()

        self._incoming = version
        if target is self._weights:
            self._machine.version = None
            self._why_no_weights = f"the weight update to version {version} is in progress"
        return EmbeddedUpdate(
            version, target.views, lambda ok: self._end_update(target, version, ok)
        )

    def sleep(self) -> None:
        """Free the memory of the KV cache and of the weights; see `GenerationEngine.sleep`."""
        self._check_may_sleep()
        self._asleep = True
        self._forget_graphs()
        self._machine.cache.free()
        self._spare = None
        self._machine.version = None
        self._why_no_weights = "sleep freed their memory; sync weights to the engine again"
        self._weights = EngineWeights((), self._device, self._dtype)
        self._machine.decoder.use({})
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream on Hopper
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate memory for the weights, which have to be synced again."""
        if self._asleep:
            self._weights = self._allocate()
            # Set last, so that the caller can retry after an out-of-memory error above.
            self._asleep = False

    def shutdown(self) -> None:
        """Do nothing: the engine has no processes of its own."""

    def _allocate(self) -> EngineWeights:
        """Allocate the weights, and let the decoder use them."""
        weights = EngineWeights(self._layout, self._device, self._dtype, self._shared)
        self._machine.decoder.use(weights.tensors)
        return weights

    def _fitting_size(self, sequences: int, tokens: int) -> CacheSize:
        """Return the size of a KV cache for `sequences` sequences of `tokens` tokens, or for as
        many sequences as fit `engine.batch_size` and `engine.kv_cache_mib`.

        The last token of a sequence needs no column. Raises AlignerError if no sequence fits.
        """
        max_rows = min(self._settings.batch_size, sequences)
        return fit(self._token_bytes, tokens - 1, max_rows, self._settings.kv_cache_mib)

    def _resize_cache(self, sequences: int, tokens: int) -> None:
        """Allocate the KV cache, and drop the resident rows.

        With CUDA graphs, a cache that is large enough is used again.
        """
        self._scheduler.clear_rows()
        longest = tokens - 1
        max_rows = min(self._settings.batch_size, sequences)
        budget = self._settings.kv_cache_mib
        size = self._fitting_size(sequences, tokens)

        if self._graphs is not None:
            # A recorded graph depends on the shape of the cache, and recording takes time. Hence
            # keep a cache that is large enough, and round up the columns of a new cache, which then
            # also suffices for later batches of similar lengths.
            current = self._machine.cache.size
            if (
                current.columns >= longest
                and current.rows >= fit(self._token_bytes, current.columns, max_rows, budget).rows
            ):
                return
            rounded = CacheSize(size.rows, -(-longest // _COLUMN_BLOCK) * _COLUMN_BLOCK)
            if budget is None or rounded.rows * rounded.columns * self._token_bytes <= budget << 20:
                size = rounded

        if self._machine.cache.resize(size):
            self._forget_graphs()
            self._scheduler.clear_rows()

    def _end_update(self, target: EngineWeights, version: int, ok: bool) -> None:
        """Switch to the weights of an update that succeeded.

        If the update failed, the old weights stay in use, unless it has overwritten them.
        """
        is_in_place = target is self._weights
        self._incoming = None
        if not ok:
            if is_in_place:
                self._why_no_weights = (
                    f"the weight update to version {version} failed after it had started to"
                    " overwrite the old weights; sync weights to the engine again"
                )
            return

        if not is_in_place:
            self._settle()
            self._exchange(target)
        self._machine.decoder.use(self._weights.tensors)
        self._machine.version = version

    def _exchange(self, target: EngineWeights) -> None:
        """Make the spare weights the current ones."""
        # A recorded graph contains the addresses of the weights, so the values have to be copied.
        if self._graphs is not None and self._graphs.recorded:
            self._weights.storage.copy_(target.storage)
            return
        self._weights, self._spare = target, self._weights

    def _settle(self) -> None:
        """Ensure that no response continues with the KV cache of the old weights.

        The caller changes the weights next. `engine.in_flight` decides whether the requests in
        flight are completed first, or prefilled again with the new weights.
        """
        if self._settings.in_flight == "finish":
            self._scheduler.finish_rows()
        else:
            self._scheduler.restart_rows()

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()


def _to_json(request: EngineRequest) -> dict[str, Any]:
    """Return a request as JSON, for the other ranks of a replica."""
    return {
        "tokens": request.tokens.tolist(),
        "sampling": asdict(request.sampling),
        "key": asdict(request.key),
        "is_continued": request.is_continued,
    }


def _from_json(fields: dict[str, Any]) -> EngineRequest:
    """Return the request of `_to_json`."""
    sampling = fields["sampling"]
    stops = tuple(sampling.pop("stop_token_ids"))
    return EngineRequest(
        torch.tensor(fields["tokens"], dtype=torch.int64),
        SamplingOptions(**sampling, stop_token_ids=stops),
        RequestKey(**fields["key"]),
        fields["is_continued"],
    )
