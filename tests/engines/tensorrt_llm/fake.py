"""A fake TensorRT-LLM without GPUs: it refuses keywords that are not in the contract, and it
generates.

Its signatures are those of `contract.py`. Its workers open handles with a restricted unpickler, cut
their slices out of the tensors that they receive, fuse them, and keep nothing else. They refuse a
weight update that follows on a failed one whose state is still there. To generate, the fake
reassembles the slices and runs them with transformers.
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
import io
import pickle
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.engines.tensorrt_llm import contract

RELEASES = {"1.2": "1.2.0", "1.3": "1.3.0rc24", "1.4": "1.4.0rc4"}
LogprobMode = enum.Enum("LogprobMode", contract.LOGPROB_MODES)


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
    path = "tensorrt_llm.SamplingParams"
    parameters = signature(path, version).parameters.copy()
    if "logprobs_mode" in parameters:
        mode = parameters["logprobs_mode"].replace(default=LogprobMode.RAW)
        parameters["logprobs_mode"] = mode

    def init(self: Any, **kwargs: Any) -> None:
        vars(self).update(bind(path, version, (), kwargs))
        if "logprobs_mode" in parameters:
            self.logprobs_mode = LogprobMode(self.logprobs_mode or LogprobMode.RAW)
        for name, low in (("top_k", 0), ("temperature", 0), ("max_tokens", 1)):
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name}={value}: must be at least {low}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}")
        self.greedy = self.top_k in (None, 1) and not self.top_p
        if max(self.n, self.best_of or 1) > 1 and self.greedy:
            raise ValueError("greedy decoding returns one sequence")

    # The class is a dataclass, whose signature has the defaults.
    return type(
        "SamplingParams",
        (),
        {"__init__": init, "__signature__": inspect.Signature(list(parameters.values()))},
    )


def sleep_config_of(version: str) -> type:
    model = model_of("tensorrt_llm.llmapi.llm_args.SleepConfig", version)

    def init(self: Any, **kwargs: Any) -> None:
        model.__init__(self, **kwargs)
        modes = {"kv_cache": "NONE"} | {
            getattr(tag, "value", tag): mode for tag, mode in (self.restore_modes or {}).items()
        }
        if not modes.keys() <= set(contract.MEMORY_TYPES_SINCE_1_3.values()):
            raise ValueError(f"restore_modes: unknown tags in {modes}")
        if not set(modes.values()) <= {"NONE", "MEMSET", "CPU", "PINNED"}:
            raise ValueError(f"restore_modes: unknown modes in {modes}")
        self.restore_modes = modes

    return type("SleepConfig", (model,), {"__init__": init})


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


def share_tensor(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return a handle with the form of a CUDA IPC handle.

    It has the same function and arguments as torch's handle of a CUDA tensor. The storage is sent
    by value, because CUDA IPC does not exist without a GPU.
    """
    storage = tensor.detach().untyped_storage()
    arguments = (
        *(type(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()),
        *(torch.storage.TypedStorage, tensor.dtype, 0, bytes(storage), storage.nbytes(), 0, False),
        *(b"", 0, b"", False),
    )
    return rebuild_cuda_tensor, arguments


def open_tensor(function: Any, arguments: Sequence[Any], device: int) -> Tensor:
    """Open a handle of `share_tensor` on a worker's device."""
    replaced = list(arguments)
    replaced[contract.DEVICE_ARGUMENT] = device
    assert function is rebuild_cuda_tensor
    _, size, stride, offset, _, dtype, where, memory, *_ = replaced
    assert where == device
    return torch.frombuffer(bytearray(memory), dtype=dtype).as_strided(size, stride, offset)


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that imports only the names that a worker allows in IPC handles."""

    def __init__(self, data: bytes, refused: Mapping[str, Sequence[str]] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._refused = refused or {}

    def find_class(self, module: str, name: str) -> Any:
        is_allowed = re.match(contract.ALLOWED_MODULES, module) or (
            module == "builtins" and name in contract.ALLOWED_BUILTINS
        )
        if not is_allowed or name in self._refused.get(module, ()):
            raise ValueError(f"Import {module} | {name} is not allowed")
        return super().find_class(module, name)


def load_handles(text: str, release: str) -> list[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    """Unpickle the handles of a GPU as a worker of the release does."""
    refused = contract.WEIGHT_UPDATES[release].refused_imports
    handles = RestrictedUnpickler(base64.b64decode(text), refused).load()
    assert isinstance(handles, list)
    return handles


class Model:
    """The part of a worker's model that weight updates use."""

    def __init__(self) -> None:
        self.loaded: set[str] | None = None
        """Tensors that were loaded since `pre_reload_weights`; None outside of an update."""

    def modules(self) -> list[Model]:
        return [self]

    def pre_reload_weights(self) -> None:
        self.loaded = set()

    def process_weights_after_loading(self) -> None:
        self.loaded = None


class ModelLoader:
    """The model loader, which writes a worker's slices."""

    def __init__(self, load: Any) -> None:
        self._load = load

    def reload(
        self, model: Model, weights: Mapping[str, Tensor], allow_partial_loading: bool = False
    ) -> None:
        assert allow_partial_loading, "a bucket is not the whole model"
        if model.loaded is None:
            raise RuntimeError("a bucket was loaded before pre_reload_weights")
        if twice := model.loaded & weights.keys():
            raise RuntimeError(f"loaded already, by an update that was not finished: {twice}")
        model.loaded |= weights.keys()
        self._load(weights)


class StatefulModelLoader(ModelLoader):
    """The model loader of releases that hold state during an update."""

    is_updating = False

    def begin_update_weights(self) -> None:
        if self.is_updating:
            raise RuntimeError("the state of an update that was not finished is still there")
        self.is_updating = True

    def finalize_update_weights(self) -> None:
        self.is_updating = False

    def abort_update_weights(self) -> None:
        self.is_updating = False


class Executor:
    """The part of a worker's `engine` that extensions use."""

    def __init__(self, llm: FakeLLM, load: Any) -> None:
        self._llm = llm
        loader = StatefulModelLoader if llm.weight_updates.has_loader_state else ModelLoader
        self.model_engine = types.SimpleNamespace(model=Model(), model_loader=loader(load))

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
        self.engine = Executor(llm, self._load)

    def report_device_id(self) -> str:
        return self.llm.device_uuid(self.rank)

    def setup_engine(self) -> None: ...

    def submit(self) -> None: ...

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if self.llm.broken_worker == self.rank:
            raise RuntimeError("out of memory")
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


def _open_bucket(worker: Any, ipc_handles: Mapping[str, str]) -> dict[str, Tensor]:
    if (uuid := worker.report_device_id()) not in ipc_handles:
        raise ValueError(f"Device UUID {uuid} not found in ipc_handles")
    handles = load_handles(ipc_handles[uuid], worker.llm.update_state)
    return {
        name: open_tensor(function, arguments, worker.device_id)
        for name, (function, arguments) in handles
    }


def _begin(worker: Any, updates: contract.WeightUpdates) -> None:
    """Prepare all modules for new weights, unless the latch says that they are prepared."""
    engine = worker.engine.model_engine
    if hasattr(engine.model, contract.LATCH):
        return
    if updates.has_loader_state:
        engine.model_loader.begin_update_weights()
    for module in engine.model.modules():
        module.pre_reload_weights()
    setattr(engine.model, contract.LATCH, True)


def _finish(worker: Any, updates: contract.WeightUpdates) -> None:
    engine = worker.engine.model_engine
    assert engine.model.loaded, "an update was finished that no bucket has begun"
    if worker.llm.worker_broken_at_end == worker.rank:
        raise RuntimeError("out of memory at the end")
    if updates.has_loader_state:
        engine.model_loader.finalize_update_weights()
    for module in engine.model.modules():
        module.process_weights_after_loading()
    worker.engine.reset_prefix_cache()
    delattr(engine.model, contract.LATCH)


def _forget(worker: Any) -> None:
    model = worker.engine.model_engine.model
    if hasattr(model, contract.LATCH):
        delattr(model, contract.LATCH)


def extension_of(updates: contract.WeightUpdates) -> type:
    """Return a release's own extension."""

    class WorkerExtension:
        def update_weights(self, ipc_handles: dict[str, Any] | None = None) -> None:
            engine = self.engine.model_engine
            with self.engine.control_action():
                try:
                    _begin(self, updates)
                    if ipc_handles is None:
                        _finish(self, updates)
                    else:
                        bucket = _open_bucket(self, ipc_handles)
                        engine.model_loader.reload(engine.model, bucket, allow_partial_loading=True)
                except Exception:
                    if updates.has_loader_state:
                        engine.model_loader.abort_update_weights()
                    if updates.clears_latch_on_failure:
                        _forget(self)
                    raise

        def check_weights_updated(self) -> bool:
            return True

    if updates.has_abort:
        WorkerExtension.abort_update_weights = lambda self, reason="": _forget(self)
    return WorkerExtension


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

    version = update_state = ""
    honors_seeds = logprobs_by_id = True
    made: list[FakeLLM] = []  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        self.arguments = bind("tensorrt_llm.AsyncLLM", self.version, (), kwargs)
        assert self.arguments["pipeline_parallel_size"] == 1
        self.workers: list[Any] = []
        self.running: set[Output] = set()
        self.released: set[str] = set()
        self.backed_up: set[str] = set()
        """Tags whose contents were copied to host memory."""
        self.has_prefixes = self.stale_prefixes = False
        self.broken_worker: int | None = None
        self.worker_broken_at_end: int | None = None
        self.calls: list[str] = []
        self._model: Any = None
        FakeLLM.made.append(self)

    @functools.cached_property
    def names(self) -> set[str]:
        return set(self._whole_model().state_dict())

    @property
    def weight_updates(self) -> contract.WeightUpdates:
        return contract.WEIGHT_UPDATES[self.update_state]

    @property
    def updating(self) -> bool:
        """Whether a worker is in an update that was begun and not finished."""
        return any(worker.engine.model_engine.model.loaded is not None for worker in self.workers)

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
        config = self.arguments.get("sleep_config")
        # Release 1.2 discards nothing but the KV cache.
        modes = {"kv_cache": "NONE"} if config is None else config.restore_modes
        self.backed_up |= {tag for tag in tags if modes.get(tag) not in ("NONE", "MEMSET")}

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
            if self.released & {"model", "model_weights"}:
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
        raw = self._model(torch.tensor([sequence])).logits[0, -1]
        logits = raw / (params.temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        logits[params.bad_token_ids or []] = float("-inf")
        if params.greedy:
            token = int(logits.argmax())
            probabilities = torch.zeros_like(logits)
            probabilities[token] = 1
        else:
            if params.top_k:
                logits[logits < logits.topk(params.top_k).values[-1]] = float("-inf")
            kept, order = logits.softmax(-1).sort(descending=True)
            kept[kept.cumsum(0) - kept >= (params.top_p or 1.0)] = 0
            token = int(order[torch.multinomial(kept, 1, generator=generator)])
            probabilities = torch.zeros_like(logits).scatter(0, order, kept / kept.sum())

        mode = getattr(params, "logprobs_mode", None)
        if mode is LogprobMode.RAW:
            logprobs = raw.log_softmax(-1)
        elif mode is LogprobMode.PROCESSED:
            logprobs = probabilities.log()
        return token, float(logprobs[token])


def memory_types(version: str) -> type[enum.Enum]:
    members = contract.MEMORY_TYPES if version == "1.2" else contract.MEMORY_TYPES_SINCE_1_3
    return enum.Enum("ExecutorMemoryType", members)


def modules(version: str, update_state: str) -> dict[str, types.ModuleType]:
    """Return a release's modules by name, with the symbols of the contract."""
    ray_workers = "executor.ray.gpu_worker" if version == "1.4" else "executor.ray_gpu_worker"
    names = ["tensorrt_llm", "llmapi", "llmapi.llm_args", "llmapi.rlhf_utils", "_torch"]
    names += ["_torch.pyexecutor", "_torch.pyexecutor.py_executor"]
    names += ["executor", "executor.result", "executor.ray", ray_workers, "sampling_params"]
    if version == "1.2":
        names.append("_torch.virtual_memory")
    made = {}
    for name in names:
        full = name if name == "tensorrt_llm" else f"tensorrt_llm.{name}"
        made[full] = types.ModuleType(full)
        made[full].__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        made[full].__path__ = []
    package, arguments = made["tensorrt_llm"], made["tensorrt_llm.llmapi.llm_args"]
    state = {"version": version, "update_state": update_state, "honors_seeds": version != "1.2"}
    package.__version__, package.AsyncLLM = RELEASES[version], type("AsyncLLM", (FakeLLM,), state)
    package.SamplingParams = sampling_params_of(version)
    for symbol in contract.SYMBOLS:
        module, _, name = symbol.path.rpartition(".")
        if module == "tensorrt_llm.llmapi" and version in symbol.versions:
            setattr(made[module], name, model_of(symbol.path, version))
    arguments.TorchLlmArgs = model_of("tensorrt_llm.AsyncLLM", version)
    if version == "1.2":
        made["tensorrt_llm._torch.virtual_memory"].ExecutorMemoryType = memory_types(version)
    else:
        arguments.ExecutorMemoryType = memory_types(version)
        arguments.SleepConfig = sleep_config_of(version)
        made["tensorrt_llm.sampling_params"].LogprobMode = LogprobMode
    made["tensorrt_llm.llmapi"].RequestOutput = Output
    made["tensorrt_llm.executor.result"].CompletionOutput = Completion
    made[f"tensorrt_llm.{ray_workers}"].RayWorkerWrapper = Worker
    made["tensorrt_llm._torch.pyexecutor.py_executor"].PyExecutor = Executor
    extension = extension_of(contract.WEIGHT_UPDATES[update_state])
    made["tensorrt_llm.llmapi.rlhf_utils"].WorkerExtension = extension
    return made


@contextlib.contextmanager
def installed(
    version: str = contract.VERSIONS[-1], update_state: str = ""
) -> Iterator[list[FakeLLM]]:
    """Make the fake importable as tensorrt_llm; yield the list of FakeLLM instances.

    Meanwhile, tensors are shared without CUDA IPC, by `share_tensor`.

    Args:
        version: Release.
        update_state: Key of `contract.WEIGHT_UPDATES`; by default the release's own.
    """
    worker = "aligner.engines.tensorrt_llm.worker"
    before = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.split(".")[0] == "tensorrt_llm"
    }
    sys.modules.pop(worker, None)
    sys.modules.update(modules(version, update_state or version))
    FakeLLM.made.clear()
    engine = "aligner.engines.tensorrt_llm.tensorrt_llm_engine.reduce_tensor"
    try:
        with mock.patch(engine, share_tensor):
            yield FakeLLM.made
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]
        sys.modules.pop(worker, None)
        sys.modules.update(before)
