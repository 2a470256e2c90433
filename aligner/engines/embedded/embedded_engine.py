"""The embedded generation engine: a decoder in plain PyTorch that runs wherever the trainer
does."""

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

_COLUMN_BLOCK = 64
"""On GPUs the cache's columns come in blocks, so that generations of like lengths replay the same
graphs."""
_PASS_TOKENS = 8192
"""Of prompts that are run in one pass, padded to the longest."""
_STEPS_ON_GPUS = 8
"""`engine.steps_per_sync` there: what a processor does between two steps of a GPU is then an eighth
of it a step."""


class EmbeddedEngine(GenerationEngine):
    """A `GenerationEngine` for every model family that Megatron trains here.

    A sample's random numbers depend on (seed, prompt id, sample index) alone; its logits depend on
    the batch it is in by the rounding of matrix products only, and with `engine.exact` not at all.
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
        """Rank `rank` of the engine's TP' x DP' ranks; the weights are not set yet.

        `group` holds the TP' ranks of this replica, in order (None when TP' is 1). `shared` are the
        trainer's own parameters, by megatron-core's name, that this rank is to use instead of
        storing them (`engine.update=shared`). Raises ConfigError when the model can not be cut so.
        `listener` is told of every pass that runs prompts.
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
        self._seed, self._device, self._shared = seed, torch.device(device), shared
        self._dtype = self.weight_format.dtype
        self._layout = parameters(shape, tensor, rank % tensor)
        sliced = can_slice(shape, self._device, self._dtype) and not settings.exact
        ways = {"exact": settings.exact, "packed": settings.packed_weights, "sliced": sliced}
        decoder = Decoder(shape, tensor, rank % tensor, group, self._device, **ways)
        cache = Cache(shape, tensor, self._device, self._dtype, by_token=sliced)
        # Which experts a step runs depends on its tokens, so that no recorded step fits the next.
        graphed = settings.cuda_graphs and self._device.type == "cuda" and not shape.num_experts
        self._graphs = GraphedForward(decoder) if graphed else None
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
        self._scheduler = Scheduler(self._machine, seed)
        self._is_reserved = False
        """Whether the KV cache has the size that `reserve` asked for."""
        self._released: list[tuple[int, int]] = []
        """Samples whose resident rows the other ranks have not freed yet."""
        self._spare: EngineWeights | None = None
        """The other set of weights: an atomic update is written into it, and the two change places.
        """
        self._weights = self._allocate()

    @property
    def version(self) -> int | None:
        """Version of the weights that serve."""
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
        """Size the KV cache for `sequences` sequences of at most `tokens` tokens, within
        `engine.batch_size` and `engine.kv_cache_mib`."""
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
        arrivals = self._take_arrivals()
        self._command("interrupt")
        for response in self._scheduler.interrupt():
            response.request.resolve(response.completion())
        for request in arrivals:
            request.resolve(DecodedResponse.begin(request, self._seed).completion())

    def fail_all(self, error: Exception) -> None:
        """Drop all requests in flight; their callers receive the error."""
        arrivals = self._take_arrivals()
        self._command("interrupt")
        in_flight = [response.request for response in self._scheduler.interrupt()]
        for request in [*in_flight, *arrivals]:
            request.fail(error)

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
            with contextlib.suppress(AlignerError):  # rank 0 raises it too, and reports it
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
        """Have the replica's other ranks execute a command, which this rank executes next."""
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
        """Enlarge the KV cache for the requests of a new batch, if nobody reserved it for them.

        A request that does not fit alone fails.
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
        """float32 [N, V] on the host: what the token after each of these prompts, int64 [P], is
        drawn by; of one rank alone.

        Raises AlignerError for prompts that do not fit, and where the engine has no weights or is
        generating.
        """
        self._check_awake("generate")
        self._check_weights()
        if self.has_work:
            raise AlignerError("the engine is generating; wait until its requests are complete")
        self.reserve(len(prompts), 1 + max(map(len, prompts)))
        found = []
        machine = self._machine
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        rows = max(1, min(machine.cache.size.rows, _PASS_TOKENS // max(map(len, prompts))))
        for first in range(0, len(prompts), rows):
            part = prompts[first : first + rows]
            lengths = torch.tensor([len(tokens) for tokens in part], device=self._device)
            copies, places = torch.arange(len(part), device=self._device), list(range(len(part)))
            run = Prompts(
                torch.cat(list(part)).to(self._device), lengths, int(lengths.max()), copies, places
            )
            with torch.inference_mode():
                logits = machine.decoder.gather_logits(
                    machine.forward(Step(none, none, 1, run), machine.cache)
                )
            assert logits is not None
            found.append(logits.float().cpu())
        return torch.cat(found)

    def take_guesses(self) -> tuple[int, int]:
        """As `GenerationEngine`; every guess counts, those behind a wrong one too."""
        machine = self._machine
        guessed, accepted, machine.guessed, machine.accepted = (
            machine.guessed,
            machine.accepted,
            0,
            0,
        )
        return guessed, accepted

    def begin_update(self, version: int) -> EmbeddedUpdate:
        """Open an update to new weights, which serve from its `commit` on."""
        self._check_may_update(version)
        target = self._weights
        # With nothing to protect, the first weights go where they will serve.
        if self._settings.update == "atomic" and self.version is not None:
            if self._spare is None:
                self._spare = EngineWeights(self._layout, self._device, self._dtype)
            target = self._spare
            if self._settings.publish == "changes":  # to what serves
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
        """Free the memory of keys and values and of the weights."""
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
        """Take the memory back, for weights to be published into."""
        if self._asleep:
            self._weights = self._allocate()
            self._asleep = False  # last: who runs out of memory above may try again

    def shutdown(self) -> None:
        """Nothing to end: the engine has no processes of its own."""

    def _allocate(self) -> EngineWeights:
        weights = EngineWeights(self._layout, self._device, self._dtype, self._shared)
        self._machine.decoder.use(weights.tensors)
        return weights

    def _fitting_size(self, sequences: int, tokens: int) -> CacheSize:
        """Return the size of a KV cache for `sequences` sequences, or as many as the memory holds;
        the last token of a sequence needs no cache. Raises AlignerError if it holds none."""
        wanted = min(self._settings.batch_size, sequences)
        return fit(self._token_bytes, tokens - 1, wanted, self._settings.kv_cache_mib)

    def _resize_cache(self, sequences: int, tokens: int) -> None:
        """Allocate the KV cache."""
        self._scheduler.clear_rows()
        longest = tokens - 1
        wanted = min(self._settings.batch_size, sequences)
        budget = self._settings.kv_cache_mib
        size = self._fitting_size(sequences, tokens)
        if self._graphs is not None:
            # Graphs know the cache's shape: a larger one serves as well, and a new one is made for
            # like lengths too.
            held = self._machine.cache.size
            if (
                held.columns >= longest
                and held.rows >= fit(self._token_bytes, held.columns, wanted, budget).rows
            ):
                return
            rounded = CacheSize(size.rows, -(-longest // _COLUMN_BLOCK) * _COLUMN_BLOCK)
            if budget is None or rounded.rows * rounded.columns * self._token_bytes <= budget << 20:
                size = rounded
        if self._machine.cache.resize(size):
            self._forget_graphs()
            self._scheduler.clear_rows()

    def _end_update(self, target: EngineWeights, version: int, ok: bool) -> None:
        in_place = target is self._weights
        self._incoming = None
        if not ok:
            if in_place:
                self._why_no_weights = (
                    f"the weight update to version {version} failed after it had started to"
                    " overwrite the old weights; sync weights to the engine again"
                )
            return
        if not in_place:
            self._settle()
            self._exchange(target)
        self._machine.decoder.use(self._weights.tensors)
        self._machine.version = version

    def _exchange(self, target: EngineWeights) -> None:
        """Put the spare weights in place of the serving ones. Recorded graphs know addresses, so
        there values move."""
        if self._graphs is not None and self._graphs.recorded:
            self._weights.storage.copy_(target.storage)
            return
        self._weights, self._spare = target, self._weights

    def _settle(self) -> None:
        """Before the weights change: no response may go on with keys and values of the old ones."""
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
