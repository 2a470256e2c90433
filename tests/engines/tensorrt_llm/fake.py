"""A fake TensorRT-LLM without GPUs: it refuses keywords that are not in the contract, and it
generates.

Its signatures are those of `contract.py`. Its workers cut their slices out of the tensors that they
receive, fuse them, and keep nothing else. To generate, the fake reassembles the slices and runs
them with transformers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import enum
import functools
import importlib
import importlib.machinery
import inspect
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.engines.tensorrt_llm import contract

RELEASES = {"1.2": "1.2.0", "1.3": "1.3.0rc13"}


def signature(path: str, version: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = []
    for name, parameter in contract.symbol(path).keywords(version).items():
        default = {contract.REQUIRED: inspect.Parameter.empty, contract.UNCOMPARED: None}.get(
            parameter.default if isinstance(parameter.default, str) else "", parameter.default
        )
        parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(
        sorted(parameters, key=lambda one: one.default is not inspect.Parameter.empty)
    )


@dataclass
class Field:
    default: Any

    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty


def bind(path: str, version: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all parameters; raise ValueError for keywords that the release does not
    have."""
    try:
        bound = signature(path, version).bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{path} of {version}: {error}") from error
    bound.apply_defaults()
    return bound.arguments


def model_of(path: str, version: str) -> type:
    """Return a class that accepts and stores a symbol's parameters, like a pydantic model that
    forbids extra fields."""

    def init(self: Any, **kwargs: Any) -> None:
        vars(self).update(bind(path, version, (), kwargs))

    fields = {
        name: Field(parameter.default)
        for name, parameter in signature(path, version).parameters.items()
    }
    return type(path.rpartition(".")[2], (), {"__init__": init, "model_fields": fields})


def sampling_params_of(version: str) -> type:
    model = model_of("tensorrt_llm.SamplingParams", version)

    def init(self: Any, **kwargs: Any) -> None:
        model.__init__(self, **kwargs)
        for name, low in (("top_k", 0), ("temperature", 0), ("max_tokens", 1)):
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name}={value}: must be at least {low}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}")
        self.greedy = self.top_k in (None, 1) and not self.top_p
        if max(self.n, self.best_of or 1) > 1 and self.greedy:
            raise ValueError("greedy decoding returns one sequence")

    return type("SamplingParams", (model,), {"__init__": init})


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


_CUT = {
    0: ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"),
    1: ("o_proj", "down_proj"),
}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _cut_axis(name: str) -> int | None:
    module = name.split(".")[-2]
    return next((axis for axis, modules in _CUT.items() if module in modules), None)


def _fused(name: str) -> tuple[str, str] | None:
    """Return the worker's fused parameter and the tensor's part in it; None if the tensor is not
    fused."""
    for whole, parts in _FUSED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(part, whole), part
    return None


class Executor:
    """The part of a worker's `engine` that extensions use."""

    def __init__(self, llm: FakeLLM, reload: Any) -> None:
        self._llm = llm
        self.model_engine = types.SimpleNamespace(
            model=None, model_loader=types.SimpleNamespace(reload=reload)
        )

    @contextlib.contextmanager
    def control_action(self) -> Iterator[None]:
        # TensorRT-LLM would wait until the running requests end; an update that holds them back
        # would wait forever.
        assert not self._llm.running, "weights change under running requests"
        yield

    def reset_prefix_cache(self) -> None:
        self._llm.has_prefixes = self._llm.stale_prefixes = False


class Worker:
    """The part of a Ray worker that extensions and updates use."""

    def __init__(self, llm: FakeLLM, rank: int, size: int) -> None:
        self.llm, self.rank, self.size, self.device_id = llm, rank, size, rank
        self.parameters: dict[str, dict[str, Tensor]] = {}
        self.engine = Executor(llm, self._reload)

    def report_device_id(self) -> str:
        return self.llm.device_uuid(self.rank)

    def setup_engine(self) -> None: ...

    def submit(self) -> None: ...

    def _reload(
        self, model: None, weights: Mapping[str, Tensor], allow_partial_loading: bool = False
    ) -> None:
        assert allow_partial_loading, "a bucket is not the whole model"
        self.llm.stale_prefixes = self.llm.stale_prefixes or self.llm.has_prefixes
        for name, tensor in weights.items():
            assert name in self.llm.names, f"the model has no {name}"
            axis = _cut_axis(name)
            share = tensor if axis is None else tensor.chunk(self.size, axis)[self.rank]
            parameter, part = _fused(name) or (name, "")
            self.parameters.setdefault(parameter, {})[part] = share.clone()

    def share(self, name: str) -> Tensor:
        parameter, part = _fused(name) or (name, "")
        if part:  # from the fused tensor, as the kernels read it
            parts = [
                self.parameters[parameter][other] for other in _FUSED[parameter.split(".")[-2]]
            ]
            index = _FUSED[parameter.split(".")[-2]].index(part)
            return torch.cat(parts).split([len(one) for one in parts])[index]
        return self.parameters[parameter][part]


class WorkerExtension:
    """The release's own extension."""

    def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
        with self.engine.control_action():
            if ipc_handles is None:
                assert self.llm.updating, "an update was finished that no bucket has begun"
                self.llm.finished += 1
                if self.llm.finished == self.size:
                    self.llm.updating, self.llm.finished = False, 0
                self.engine.reset_prefix_cache()
                return
            self.llm.updating = True
            if self.llm.broken_worker == self.rank:
                raise RuntimeError("out of memory")
            if (uuid := self.report_device_id()) not in ipc_handles:
                raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
            handles = pickle.loads(base64.b64decode(ipc_handles[uuid]))
            weights = {name: function(*arguments) for name, (function, arguments) in handles}
            self.engine.model_engine.model_loader.reload(None, weights, allow_partial_loading=True)

    def check_weights_updated(self) -> bool:
        return True


class Output:
    """A request's result: awaitable, or a stream."""

    def __init__(self, llm: FakeLLM, prompt: list[int], params: Any, streaming: bool) -> None:
        self._outputs = [Completion()]
        self._llm, self._prompt, self._params, self._streaming = llm, prompt, params, streaming
        self._chunks: asyncio.Queue[tuple[list[int], list[Any], str | None]] = asyncio.Queue()
        self._aborted = self._done = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def outputs(self) -> list[Completion]:
        return self._outputs

    def abort(self) -> None:
        self._aborted = True

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> Output:
        if self._done:
            raise StopAsyncIteration
        chunk = await self._chunks.get()
        if isinstance(chunk, BaseException):
            raise chunk
        completion = self.outputs[0]
        tokens, logprobs, reason = chunk
        completion.token_ids.extend(tokens)
        completion.logprobs.extend(logprobs)
        if reason is not None:
            completion.finish_reason, self._done = reason, True
        return self

    def __await__(self) -> Any:
        return self._all().__await__()

    async def _all(self) -> Output:
        async for _ in self:
            pass
        return self

    async def _run(self) -> None:
        self._llm.running.add(self)
        try:
            await self._draw()
        except Exception as error:
            await self._chunks.put(error)
        finally:
            self._llm.running.discard(self)

    async def _draw(self) -> None:
        params, tokens, logprobs, sent = self._params, [], [], 0
        generator = torch.Generator()
        if self._llm.honors_seeds and params.seed is not None:
            generator.manual_seed(params.seed)
        else:
            generator.seed()
        reason = None
        while reason is None:
            await asyncio.sleep(0)
            token, logprob = self._llm.draw([*self._prompt, *tokens], params, generator)
            tokens.append(token)
            logprobs.append({token: Logprob(logprob)} if self._llm.logprobs_by_id else logprob)
            if token == params.end_id or token in (params.stop_token_ids or ()):
                reason = "stop"
            elif len(tokens) == params.max_tokens:
                reason = "length"
            elif self._aborted:
                reason = "cancelled"
                logprobs.pop()  # a cancelled request's last token may lack its log-prob
            if (
                self._streaming
                and reason is None
                and len(tokens) - sent >= self._llm.arguments["stream_interval"]
            ):
                await self._chunks.put((tokens[sent:], logprobs[sent:], None))
                sent = len(tokens)
        if reason == "stop" and not params.include_stop_str_in_output:
            tokens.pop()
        if reason == "cancelled" and len(tokens) - sent > 1:  # unsent tokens are lost
            tokens, logprobs = tokens[:sent], logprobs[:sent]
        await self._chunks.put((tokens[sent:], logprobs[sent:], reason))


class FakeLLM:
    """The fake of AsyncLLM."""

    version = ""
    honors_seeds = logprobs_by_id = True
    made: list[FakeLLM] = []  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        self.arguments = bind("tensorrt_llm.AsyncLLM", self.version, (), kwargs)
        assert self.arguments["pipeline_parallel_size"] == 1
        self.workers: list[Any] = []
        self.running: set[Output] = set()
        self.released: set[str] = set()
        self.updating = self.has_prefixes = self.stale_prefixes = False
        self.finished = 0
        self.broken_worker: int | None = None
        self.calls: list[str] = []
        self._model: Any = None
        FakeLLM.made.append(self)

    @functools.cached_property
    def names(self) -> set[str]:
        return set(self._whole_model().state_dict())

    def device_uuid(self, rank: int) -> str:
        return f"CPU-{rank}"

    async def setup_async(self) -> FakeLLM:
        path, _, name = self.arguments["ray_worker_extension_cls"].rpartition(".")
        extension = getattr(importlib.import_module(path), name)
        conflicts = [
            one for one in dir(extension) if not one.startswith("__") and hasattr(Worker, one)
        ]
        assert not conflicts, f"the worker has {conflicts} already"
        kind = type("ExtendedWorker", (Worker, extension), {})
        size = self.arguments["tensor_parallel_size"]
        self.workers = [kind(self, rank, size) for rank in range(size)]
        return self

    def generate_async(self, *args: Any, **kwargs: Any) -> Output:
        given = bind("tensorrt_llm.AsyncLLM.generate_async", self.version, args, kwargs)
        inputs, params = given["inputs"], given["sampling_params"]
        if not self.workers or self.updating or self.released or self.stale_prefixes:
            raise RuntimeError(
                f"not ready: workers {len(self.workers)}, an update without its end:"
                f" {self.updating}, asleep: {self.released}, cached keys of other weights:"
                f" {self.stale_prefixes}"
            )
        if not inputs or not all(isinstance(token, int) for token in inputs):
            raise ValueError("inputs: a prompt's token ids were expected")
        if len(inputs) > self.arguments["max_input_len"]:
            raise ValueError("the prompt exceeds max_input_len")
        if len(inputs) + params.max_tokens > self.arguments["max_seq_len"]:
            raise ValueError("the request exceeds max_seq_len")
        self.has_prefixes = True
        return Output(self, list(inputs), params, given["streaming"])

    async def release(self, tags: Sequence[str]) -> None:
        self._check_tags(tags)
        assert not self.running
        if self.released:
            raise RuntimeError(f"{self.released} is released already: resume it first")
        self.calls.append("release")
        self.stale_prefixes = self.stale_prefixes or self.has_prefixes
        self.released |= set(tags)

    async def resume(self, tags: Sequence[str]) -> None:
        self._check_tags(tags)
        self.calls.append("resume " + ("cache" if contract.KV_CACHE in tags else "model"))
        self.released -= set(tags)

    def _check_tags(self, tags: Sequence[str]) -> None:
        if not (self.arguments.get("enable_sleep") or self.arguments.get("sleep_config")):
            raise RuntimeError("sleep is not enabled")
        known = {one.value for one in memory_types(self.version) if not one.value.startswith("_")}
        if not tags or not set(tags) <= known:
            raise ValueError(f"tags {tags}; known: {known}")

    async def update_weights(self, weights: dict[str, Any] | None) -> None:
        await self.collective_rpc("update_weights", args=(weights,))

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:
        given = bind("tensorrt_llm.AsyncLLM.collective_rpc", self.version, args, kwargs)
        method = given["method"]
        if method == "update_weights":
            if "model" in self.released:
                raise RuntimeError("weights are updated while their memory is released")
            self._model = None
            self.calls.append("update" if given["args"] != (None,) else "end update")
        calls = [
            asyncio.to_thread(getattr(worker, method), *given["args"], **(given["kwargs"] or {}))
            for worker in self.workers
        ]
        return list(await asyncio.gather(*calls))

    def shutdown(self) -> None:
        self.workers = []

    def _whole_model(self) -> Any:
        """Return the model of transformers, without loaded weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(self.arguments["model"]), dtype=torch.float32
        )

    def whole_weights(self) -> dict[str, Tensor]:
        """Return whole tensors, assembled from the workers' slices."""
        found = {}
        for name in self.names:
            if name == "lm_head.weight" and name not in self.workers[0].parameters:
                continue  # tied
            shares = [worker.share(name) for worker in self.workers]
            axis = _cut_axis(name)
            if axis is None:
                assert all(torch.equal(share, shares[0]) for share in shares), name
            found[name] = shares[0] if axis is None else torch.cat(shares, axis)
        return found

    @torch.no_grad()
    def draw(
        self, sequence: list[int], params: Any, generator: torch.Generator
    ) -> tuple[int, float]:
        if self._model is None:
            self._model = self._whole_model().eval()
            missing, unexpected = self._model.load_state_dict(self.whole_weights(), strict=False)
            assert not unexpected
            assert set(missing) <= {"lm_head.weight"}
            self._model.tie_weights()
        logits = self._model(torch.tensor([sequence])).logits[0, -1] / (params.temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        logits[params.bad_token_ids or []] = float("-inf")
        if params.greedy:
            token = int(logits.argmax())
            return token, float(logprobs[token])
        if params.top_k:
            logits[logits < logits.topk(params.top_k).values[-1]] = float("-inf")
        probabilities, order = logits.softmax(-1).sort(descending=True)
        probabilities[probabilities.cumsum(0) - probabilities >= (params.top_p or 1.0)] = 0
        token = int(order[torch.multinomial(probabilities, 1, generator=generator)])
        return token, float(logprobs[token])


def memory_types(version: str) -> type[enum.Enum]:
    tags = (*contract.MEMORY_TAGS, *(contract.WEIGHT_TAGS_SINCE_1_3 if version != "1.2" else ()))
    return enum.Enum(
        "ExecutorMemoryType", {tag.upper(): tag for tag in (*tags, "_no_capture_init_kv_cache")}
    )


def modules(version: str) -> dict[str, types.ModuleType]:
    """Return a release's modules by name, with the symbols of the contract."""
    names = ("tensorrt_llm", "llmapi", "llmapi.llm_args", "llmapi.rlhf_utils", "_torch")
    names = (*names, "_torch.pyexecutor", "_torch.pyexecutor.py_executor")
    names = (*names, "executor", "executor.result", "executor.ray_gpu_worker")
    if version == "1.2":
        names = (*names, "_torch.virtual_memory")
    made = {}
    for name in names:
        full = name if name == "tensorrt_llm" else f"tensorrt_llm.{name}"
        made[full] = types.ModuleType(full)
        made[full].__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        made[full].__path__ = []
    package, arguments = made["tensorrt_llm"], made["tensorrt_llm.llmapi.llm_args"]
    llm = type("AsyncLLM", (FakeLLM,), {"version": version, "honors_seeds": version != "1.2"})
    package.__version__, package.AsyncLLM = RELEASES[version], llm
    package.SamplingParams = sampling_params_of(version)
    for path in ("tensorrt_llm.llmapi.KvCacheConfig", "tensorrt_llm.llmapi.CudaGraphConfig"):
        setattr(made["tensorrt_llm.llmapi"], path.rpartition(".")[2], model_of(path, version))
    arguments.TorchLlmArgs = model_of("tensorrt_llm.AsyncLLM", version)
    if version == "1.2":
        made["tensorrt_llm._torch.virtual_memory"].ExecutorMemoryType = memory_types(version)
    else:
        arguments.ExecutorMemoryType = memory_types(version)
        arguments.SleepConfig = model_of("tensorrt_llm.llmapi.llm_args.SleepConfig", version)
    made["tensorrt_llm.llmapi"].RequestOutput = Output
    made["tensorrt_llm.executor.result"].CompletionOutput = Completion
    made["tensorrt_llm.executor.ray_gpu_worker"].RayWorkerWrapper = Worker
    made["tensorrt_llm._torch.pyexecutor.py_executor"].PyExecutor = Executor
    made["tensorrt_llm.llmapi.rlhf_utils"].WorkerExtension = WorkerExtension
    return made


@contextlib.contextmanager
def installed(version: str = "1.3") -> Iterator[list[FakeLLM]]:
    """Make the fake importable as tensorrt_llm; yield the list of FakeLLM instances."""
    worker = "aligner.engines.tensorrt_llm.worker"
    before = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "tensorrt_llm"
    }
    sys.modules.pop(worker, None)
    sys.modules.update(modules(version))
    FakeLLM.made.clear()
    try:
        yield FakeLLM.made
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]
        sys.modules.pop(worker, None)
        sys.modules.update(before)
