"""The embedded generation engine: a decoder in plain PyTorch that runs on every device that the
trainer supports."""

import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.data.collectives import broadcast_json
from aligner.engines.embedded.cache import CacheSize, KVCache, compute_cache_size
from aligner.engines.embedded.decoded_response import DecodedResponse
from aligner.engines.embedded.decoder import Decoder
from aligner.engines.embedded.engine_state import EngineState
from aligner.engines.embedded.engine_weights import (
    EmbeddedUpdate,
    EngineWeights,
    compute_parameters,
)
from aligner.engines.embedded.graphs import GraphedForward
from aligner.engines.embedded.scheduler import Scheduler
from aligner.engines.embedded.scoring import score_sequences, select_next_pass
from aligner.engines.embedded.sliced_attention import can_slice
from aligner.engines.engine_protocol import (
    EngineRequest,
    GenerationCounts,
    GenerationEngine,
    RequestKey,
    SamplingOptions,
    ScoringRequest,
    SpanListener,
    compute_weight_format,
)
from aligner.errors import AlignerError, ConfigError
from aligner.models import batch_invariant
from aligner.models.layouts import (
    cache_bytes_per_token,
    choose_block_tokens,
    count_blocks,
    engine_problems,
    speculation_problems,
    state_bytes_per_row,
)
from aligner.models.shape import ModelShape
from aligner.schema import EngineConfig

# Default of `engine.steps_per_sync` on GPUs: each step then bears an eighth of the host's work
# between two synchronizations.
_GPU_STEPS_PER_SYNC = 8


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
        tokenizer_directory: Path | None = None,
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
            tokenizer_directory: Directory with the model's tokenizer, for stop strings and
                grammars.

        Raises:
            ConfigError: The model cannot be divided into this layout, or `group` is missing, or the
                kernels are not batch-invariant on this machine (`engine.exact`).
        """
        tensor_parallel_size = settings.parallel.tensor
        problems = [
            *engine_problems(settings.parallel, shape),
            *speculation_problems(settings.speculation, shape),
        ]
        if problems:
            raise ConfigError("\n".join(problems))
        if tensor_parallel_size > 1 and group is None:
            raise ConfigError(
                f"engine.parallel.tensor={tensor_parallel_size}: requires the process group of the"
                " replica's ranks, got None"
            )
        if settings.exact:
            batch_invariant.require_batch_invariance(shape)
        weight_format = compute_weight_format(settings, device, shape.family)
        super().__init__(shape, settings, weight_format, tokenizer_directory)
        self._device = torch.device(device)
        self._shared = shared
        self._dtype = self.weight_format.dtype
        tensor_rank = rank % tensor_parallel_size
        self._layout = compute_parameters(shape, settings.parallel, tensor_rank)

        # The sliced kernel is not batch-invariant.
        is_sliced = can_slice(shape, self._device, self._dtype) and not settings.exact
        decoder = Decoder(
            shape,
            tensor_parallel_size,
            tensor_rank,
            group,
            self._device,
            expert_parallel_size=settings.parallel.expert,
            exact=settings.exact,
            packed=settings.packed_weights,
            sliced=is_sliced,
        )
        # In a mixture-of-experts model, the experts that a step runs depend on its tokens, so that
        # the next step cannot replay a captured graph.
        is_on_gpu = self._device.type == "cuda"
        # The run before a capture would advance the states of delta nets by one token too many.
        uses_graphs = (
            settings.cuda_graphs and is_on_gpu and not shape.num_experts and shape.delta_net is None
        )
        self._graphs = GraphedForward(decoder) if uses_graphs else None
        forward = self._graphs.forward if self._graphs else decoder.forward
        cache = KVCache(
            shape,
            tensor_parallel_size,
            self._device,
            self._dtype,
            token_major=is_sliced,
            null_block=uses_graphs,
        )

        default_steps = _GPU_STEPS_PER_SYNC if is_on_gpu else 1
        self._state = EngineState(
            decoder,
            cache,
            forward,
            self._device,
            listener=listener,
            speculation=settings.speculation,
            steps_per_sync=settings.steps_per_sync or default_steps,
        )
        self._token_bytes = cache_bytes_per_token(shape, tensor_parallel_size, self._dtype.itemsize)
        self._state_bytes = state_bytes_per_row(shape, tensor_parallel_size, self._dtype.itemsize)
        self._group = group
        self._is_leader = tensor_rank == 0
        self._turn_message: Any = None
        """Message of rank 0's `end_turn`, on the replica's other ranks."""
        self._scheduler = Scheduler(self._state, seed)
        self._is_reserved = False
        """Whether the KV cache has the size that the last call of `reserve` requested."""
        self._released: list[tuple[int, int]] = []
        """Samples whose cached sequences the other ranks have not evicted yet."""
        self._spare: EngineWeights | None = None
        """Second set of weights. An atomic update writes to it, and its commit swaps the two sets.
        """
        self._weights = self._allocate_weights()

    @property
    def version(self) -> int | None:
        """Version of the current weights; see `GenerationEngine.version`."""
        return self._state.version

    @property
    def is_leader(self) -> bool:
        """See `GenerationEngine.is_leader`."""
        return self._is_leader

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        # A scoring request whose caller has left is never executed.
        has_scoring_requests = any(
            not request.future.cancelled() for request in self._scoring_requests
        )
        return bool(self._arrivals) or has_scoring_requests or self._scheduler.has_work

    def reserve(self, sequences: int, tokens: int) -> None:
        """Allocate a KV cache for `sequences` sequences of at most `tokens` tokens.

        `engine.batch_size` and `engine.kv_cache_mib` limit its size. Raises AlignerError if not
        even one sequence fits.
        """
        self._broadcast_command("reserve", sequences=sequences, tokens=tokens)
        self._reserve(sequences, tokens)

    def step(self) -> None:
        """See `GenerationEngine.step`."""
        arrivals = self._take_arrivals()
        scoring_requests = self._take_scoring_requests()
        # Sent with the step, because a message for each release would cost a collective of its own.
        released = self._released
        self._released = []
        if self._group is not None:
            requests = [_request_to_json(request) for request in arrivals]
            self._broadcast_command(
                "step",
                requests=requests,
                released=released,
                scoring_requests=[_scoring_request_to_json(each) for each in scoring_requests],
            )
        self._execute_scoring(scoring_requests)
        self._check_awake("generate")
        self._execute_step(arrivals)

    def interrupt(self) -> None:
        """See `GenerationEngine.interrupt`."""
        for response in self._stop_requests():
            response.request.resolve(response.build_completion())

    def fail_all(self, error: Exception) -> None:
        """Drop all queued requests and requests in flight; their callers receive the error."""
        for response in self._stop_requests():
            response.request.fail(error)
        with self._arrivals_lock:
            scoring_requests = self._scoring_requests
            self._scoring_requests = []
        for scoring_request in scoring_requests:
            scoring_request.fail(error)

    def _stop_requests(self) -> list[DecodedResponse]:
        """Remove all queued requests and requests in flight, and return them as they are."""
        self._scheduler.queue(self._take_arrivals())
        self._broadcast_command("interrupt")
        return self._scheduler.interrupt()

    def release(self, prompt_id: int, sample_index: int) -> None:
        """See `GenerationEngine.release`."""
        self._scheduler.release_cached(prompt_id, sample_index)
        if self._group is not None:
            self._released.append((prompt_id, sample_index))

    def _reserve(self, sequences: int, tokens: int) -> None:
        """Execute `reserve` on this rank."""
        self._resize_cache(sequences, tokens)
        self._is_reserved = True

    def follow(self) -> None:
        """Execute the steps of the replica's rank 0; see `GenerationEngine.follow`."""
        while (command := broadcast_json(None, group=self._group))["do"] != "end_turn":
            # Rank 0 executes the same command, raises the same error, and reports it.
            with contextlib.suppress(AlignerError):
                self._execute_command(command)
        self._turn_message = command["message"]

    def end_turn(self, message: Any = None) -> Any:
        """See `GenerationEngine.end_turn`."""
        if self._group is None:
            return message
        if self._is_leader:
            self._broadcast_command("end_turn", message=message)
            return message
        return self._turn_message

    def _broadcast_command(self, name: str, **arguments: Any) -> None:
        """Send a command to the replica's other ranks; the caller executes it next."""
        if self._group is not None:
            broadcast_json({"do": name, **arguments}, group=self._group)

    def _execute_command(self, command: dict[str, Any]) -> None:
        """Execute a command of the replica's rank 0."""
        if command["do"] == "reserve":
            self._reserve(command["sequences"], command["tokens"])
        elif command["do"] == "interrupt":
            self._scheduler.interrupt()
        else:
            for prompt_id, sample_index in command["released"]:
                self._scheduler.release_cached(prompt_id, sample_index)
            requests = [_request_from_json(request) for request in command["requests"]]
            for request in requests:
                self._begin_stop_search(request)
            self._execute_scoring(
                [_scoring_request_from_json(fields) for fields in command["scoring_requests"]]
            )
            self._execute_step(requests)

    def _take_scoring_requests(self) -> list[ScoringRequest]:
        """Return the queued scoring requests for one forward pass."""
        with self._arrivals_lock:
            waiting = [
                request for request in self._scoring_requests if not request.future.cancelled()
            ]
            count = select_next_pass(waiting)
            self._scoring_requests = waiting[count:]
        return waiting[:count]

    def _execute_scoring(self, requests: Sequence[ScoringRequest]) -> None:
        """Score sequences in one forward pass, and deliver the scores, or the error of an engine
        without weights. Collective."""
        if not requests or self._fail_without_weights(requests):
            return
        scores = score_sequences(self._state, requests, self._shape.vocab_size)
        for request, request_scores in zip(requests, scores, strict=True):
            request.resolve(request_scores)

    def _execute_step(self, arrivals: Sequence[EngineRequest]) -> None:
        """Run one step of the scheduler, and deliver the completions that it finishes."""
        self._scheduler.queue(arrivals)
        self._ensure_cache_size(self._scheduler.get_next_batch())
        self._scheduler.join_batch()
        for response in self._scheduler.step():
            response.request.resolve(response.build_completion())

    def _ensure_cache_size(self, requests: Sequence[EngineRequest]) -> None:
        """Enlarge the KV cache for the requests of a new batch if it is too small.

        More sequences are allowed only if the size was not set by `reserve`. A request that would
        not fit even into an empty cache fails.
        """
        size = self._state.cache.size
        tokens = 0
        sequences = 0
        for request in requests:
            try:
                self._compute_cache_size(1, request.total_tokens)
            except AlignerError as error:
                self._scheduler.remove(request)
                request.fail(error)
                continue
            # The last token of a sequence is never run, so it is not in the cache.
            tokens = max(tokens, request.total_tokens - 1)
            sequences += 1

        needed_sequences = min(sequences, self._settings.batch_size)
        has_few_sequences = needed_sequences > size.sequences and not self._is_reserved
        if tokens > size.tokens or has_few_sequences:
            self._resize_cache(max(sequences, size.sequences), max(tokens, size.tokens) + 1)
            self._is_reserved = False

    def take_counts(self) -> GenerationCounts:
        """See `GenerationEngine.take_counts`."""
        state = self._state
        counts = GenerationCounts(
            state.num_draft_tokens, state.num_accepted_tokens, state.num_preemptions
        )
        state.num_draft_tokens = 0
        state.num_accepted_tokens = 0
        state.num_preemptions = 0
        return counts

    def begin_update(self, version: int) -> EmbeddedUpdate:
        """See `GenerationEngine.begin_update`."""
        self._check_can_update(version)
        target = self._weights
        # An atomic update writes to the spare weights. If there are no current weights to preserve,
        # it writes in place.
        if self._settings.update == "atomic" and self.version is not None:
            if self._spare is None:
                self._spare = EngineWeights(self._layout, self._device, self._dtype)
            target = self._spare
            # The update contains only the elements that differ from the current weights.
            if self._settings.publish == "changes":
                target.copy_from(self._weights)
        elif self.version is not None:
            # The update overwrites the current weights from now on.
            self._finish_or_restart_requests()

        self._incoming_version = version
        if target is self._weights:
            self._state.version = None
            self._no_weights_reason = f"the weight update to version {version} is in progress"
        return EmbeddedUpdate(
            version, target.views, lambda succeeded: self._end_update(target, version, succeeded)
        )

    def held_weights(self) -> Mapping[str, Tensor]:
        """See `GenerationEngine.held_weights`. The packed copies of matrices on CPUs cannot be read
        back."""
        return self._weights.views

    @property
    def shared_names(self) -> Container[str]:
        """See `GenerationEngine.shared_names`."""
        return self._weights.shared_names

    def discard_weights(self, reason: str) -> None:
        """See `GenerationEngine.discard_weights`."""
        self._state.version = None
        self._no_weights_reason = reason

    def sleep(self) -> None:
        """Free the memory of the KV cache and of the weights; see `GenerationEngine.sleep`."""
        self._check_can_sleep()
        self._is_asleep = True
        # Graphs contain the addresses of the memory that is freed below.
        self._clear_graphs()
        self._state.cache.free()
        self._spare = None
        self._state.version = None
        self._no_weights_reason = "sleep freed their memory; sync weights to the engine again"
        self._weights = EngineWeights((), self._device, self._dtype)
        self._state.decoder.set_weights({})
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream on Hopper
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate memory for the weights, which have to be synced again."""
        if self._is_asleep:
            self._weights = self._allocate_weights()
            # Set last, so that the caller can retry after an out-of-memory error above.
            self._is_asleep = False

    def shutdown(self) -> None:
        """Do nothing: the engine has no processes of its own."""

    def _allocate_weights(self) -> EngineWeights:
        """Allocate the weights, and let the decoder use them."""
        weights = EngineWeights(self._layout, self._device, self._dtype, self._shared)
        self._state.decoder.set_weights(weights.tensors)
        return weights

    def _compute_cache_size(self, sequences: int, tokens: int) -> CacheSize:
        """Return the size of a KV cache for `sequences` sequences of `tokens` tokens, or for as
        many sequences and blocks as `engine.batch_size` and `engine.kv_cache_mib` allow.

        The last token of a sequence is not in the cache. Raises AlignerError if no sequence fits.
        """
        max_tokens = tokens - 1
        block_tokens = choose_block_tokens(max_tokens, is_gpu=self._device.type == "cuda")
        if self._graphs is not None:
            # The cache then also suffices for later batches of similar lengths.
            max_tokens = count_blocks(max_tokens, block_tokens) * block_tokens
        return compute_cache_size(
            self._token_bytes,
            max_tokens,
            min(self._settings.batch_size, sequences),
            self._settings.kv_cache_mib,
            block_tokens,
            self._state_bytes,
        )

    def _resize_cache(self, sequences: int, tokens: int) -> None:
        """Allocate the KV cache, and forget the cached sequences.

        With CUDA graphs, a cache that is large enough is used again, because a captured graph
        depends on the size of the cache, and capturing takes time.
        """
        self._scheduler.clear_blocks()
        size = self._compute_cache_size(sequences, tokens)
        current = self._state.cache.size
        if (
            self._graphs is not None
            and current.tokens >= size.tokens
            and current.sequences >= size.sequences
            and current.blocks >= size.blocks
        ):
            return

        if self._state.cache.resize(size):
            self._clear_graphs()
            self._scheduler.clear_blocks()

    def _end_update(self, target: EngineWeights, version: int, succeeded: bool) -> None:
        """Switch to the weights of an update that succeeded.

        If the update failed, the old weights stay in use, unless it has overwritten them.
        """
        is_in_place = target is self._weights
        self._incoming_version = None
        if not succeeded:
            if is_in_place:
                self._no_weights_reason = (
                    f"the weight update to version {version} failed after it had started to"
                    " overwrite the old weights; sync weights to the engine again"
                )
            return

        if not is_in_place:
            self._finish_or_restart_requests()
            self._swap_weights(target)
        self._state.decoder.set_weights(self._weights.tensors)
        self._state.version = version
        self._verified_version = None

    def _swap_weights(self, target: EngineWeights) -> None:
        """Exchange the active weights and the spare weights."""
        # A captured graph contains the addresses of the weights, so the values have to be copied.
        if self._graphs is not None and self._graphs.has_graphs:
            self._weights.copy_from(target)
            return
        previous = self._weights
        self._weights = target
        self._spare = previous

    def _finish_or_restart_requests(self) -> None:
        """Ensure that no response continues with the KV cache of the old weights.

        The caller changes the weights next. `engine.in_flight` decides whether the requests in
        flight are completed first, or prefilled again with the new weights.
        """
        if self._settings.in_flight == "finish":
            self._scheduler.finish_running()
        else:
            self._scheduler.restart_running()

    def _clear_graphs(self) -> None:
        """Delete the captured CUDA graphs, whose addresses are about to become invalid."""
        if self._graphs is not None:
            self._graphs.clear()


def _request_to_json(request: EngineRequest) -> dict[str, Any]:
    """Return a request as JSON, for the other ranks of a replica."""
    return {
        "tokens": request.tokens.tolist(),
        "sampling": asdict(request.sampling),
        "key": asdict(request.key),
        "is_continued": request.is_continued,
        "stop_search_start": request.stop_search_start,
    }


def _scoring_request_to_json(request: ScoringRequest) -> dict[str, Any]:
    """Return a scoring request as JSON, for the other ranks of a replica."""
    return {
        "tokens": request.tokens.tolist(),
        "start": request.start,
        "top_logprobs": request.top_logprobs,
        "temperature": request.temperature,
    }


def _scoring_request_from_json(fields: dict[str, Any]) -> ScoringRequest:
    """Return the request of `_scoring_request_to_json`."""
    return ScoringRequest(**fields | {"tokens": torch.tensor(fields["tokens"], dtype=torch.int64)})


def _request_from_json(fields: dict[str, Any]) -> EngineRequest:
    """Return the request of `_request_to_json`."""
    return EngineRequest(
        torch.tensor(fields["tokens"], dtype=torch.int64),
        SamplingOptions.from_json(fields["sampling"]),
        RequestKey(**fields["key"]),
        fields["is_continued"],
        fields["stop_search_start"],
    )
