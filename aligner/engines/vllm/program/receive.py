"""Extension of vLLM's workers: receives weights and adapts the sampler.

vLLM's workers import this module. A worker receives its weights through memory that the rank of
aligner's replica with the same index shares.

A worker gets only the slices that it needs, each in a tensor of the whole shape. vLLM slices, fuses
and pads these tensors in the same way as tensors from a file. The platform of the worker may store
loaded weights differently, for example as packed copies; these are made when the update ends.
"""

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grammar_processor
import held_weights
import torch
from torch import Tensor
from vllm.distributed import get_world_group
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, SKIP_TENSORS
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from weight_memory import compute_checksum, copy_tensors, count_elements, open_memory

# Names of parameters that vLLM 0.32 copies without a weight loader. A reload would let it copy into
# placeholders, so it must leave these parameters as they are.
_COPIED_TENSORS = {"sinks"}
SKIP_LOAD_TENSORS.update(_COPIED_TENSORS)
SKIP_TENSORS.update(_COPIED_TENSORS)

# Norms of the latents of latent attention, and their epsilon in the model code of DeepSeek-V2 and
# V3. vLLM 0.32 uses the entry `rms_norm_eps` for them too.
_LATENT_NORMS = {"q_a_layernorm", "kv_a_layernorm"}
_LATENT_NORM_EPSILON = 1e-6


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Initialization data of the weight transfer, which is empty."""


@dataclass
class SharedTensors(WeightTransferUpdateInfo):
    """Some of the model's tensors, as one message of a weight update."""

    of_ranks: dict[str, dict[str, Any]]
    """Handles of `weight_memory.SharedSlices` by the worker that needs the slices.

    Workers that need no slice of this message have no handle. The keys are strings, since the
    handles are sent as JSON.
    """


class SharedMemoryEngine(WeightTransferEngine[NoInitInfo, SharedTensors]):
    """Weight transfer engine of vLLM that loads tensors from shared memory.

    It verifies the checksum of the memory before it loads the tensors. It also checks that an
    update contains every parameter, and only tensors that the model has.
    """

    init_info_cls = NoInitInfo
    update_info_cls = SharedTensors
    supports_draft_weight_update = False
    should_verify = False
    """Whether the parameters are compared with the received weights in the next update."""
    recorder: held_weights.LoadRecorder | None = None
    """Recorder of the last update; None if it is not verified."""

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing; the transfer needs no initialization."""

    def start_weight_update(self) -> None:
        """Prepare all layers for new weights.

        vLLM processes the weights of a layer as soon as the layer is complete.
        """
        # During the update, vLLM treats tied parameters as separate ones. They share one name here,
        # the first one, because the update contains the weights of only one of them.
        first_names: dict[int, str] = {}
        tied_names: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            tied_names[name] = first_names.setdefault(id(parameter), name)

        for parameter in self.model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            # vLLM 0.32 reads the name of every loader, which MiniMax-M2's partial functions lack.
            if isinstance(loader, functools.partial):
                loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]
        initialize_layerwise_reload(self.model)

        self.missing_parameters: set[str] = set()
        """Names of the parameters that have not received weights in this update."""
        self._unused_tensors: set[str] = set()
        """Names of the received tensors that vLLM has not loaded into any parameter."""
        # `initialize_layerwise_reload` replaced the parameters and wrapped their weight loaders.
        for name, parameter in self.model.named_parameters():
            own_name = name.rpartition(".")[2]
            if own_name in _COPIED_TENSORS:
                # `find_nan_parameters` finds what the update lacks.
                parameter.data.fill_(torch.nan)
                continue
            if own_name in SKIP_LOAD_TENSORS:
                # vLLM leaves these parameters and their loaders as they are, so the wrapper of the
                # last update must be removed here.
                loader = getattr(parameter, "weight_loader", default_weight_loader)
                parameter.weight_loader = inspect.unwrap(loader)
            self._track_loading(parameter, tied_names.get(name, name))

        self.recorder = held_weights.LoadRecorder(self.model) if self.should_verify else None

        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] in _LATENT_NORMS:
                module.variance_epsilon = _LATENT_NORM_EPSILON

        if self.device.type == "cpu":
            # vLLM 0.32 packs experts only if they have no kernel yet, that is, only in the first
            # update. Deleting the kernel is safe, since there are no CUDA graphs with its address.
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None

    def finish_weight_update(self) -> None:
        """Finish the update after all tensors have been received."""
        with held_weights.recording(self.recorder):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # An output layer that is tied to the embedding receives no weights of its own. vLLM
            # therefore keeps its old packed copy, which must be made again here.
            seen_weights: set[int] = set()
            for module in self.model.modules():
                weight = getattr(module, "weight", None)
                if id(weight) in seen_weights:
                    module.quant_method.process_weights_after_loading(module)
                elif weight is not None:
                    seen_weights.add(id(weight))

    def receive_weights(self, update_info: SharedTensors) -> None:
        """Load the tensors of one message.

        Raises:
            ValueError: The checksum of the memory differs, this worker cannot open the memory, or
                the part of the model in this worker has no parameter for a tensor.
        """
        handle = update_info.of_ranks.get(str(get_world_group().rank_in_group))
        if handle is None:
            return
        with open_memory(handle["memory"], self.device) as memory:
            if (actual := compute_checksum(memory)) != handle["checksum"]:
                raise ValueError(
                    f"the received weights have checksum {actual:016x}, expected"
                    f" {handle['checksum']:016x}"
                )
            # Copied one by one: vLLM frees the tensors of a layer when the layer is complete.
            tensors = copy_tensors(memory, handle["pieces"], self.device)
            counts = count_elements(handle["pieces"])
            with held_weights.recording(self.recorder):
                self.model.load_weights(self._track_tensors(tensors, counts))

        if self._unused_tensors:
            raise ValueError(
                f"vLLM's model has no parameter for {', '.join(sorted(self._unused_tensors))}"
            )

    def find_nan_parameters(self) -> list[str]:
        """Return the names of the parameters that contain NaN.

        Weights that a CPU worker has packed are not checked.
        """
        # `weight_memory.copy_tensors` fills what it does not receive with NaN, so a slice that vLLM
        # needs and the update lacks is found here.
        return [
            name for name, parameter in self.model.named_parameters() if parameter.isnan().any()
        ]

    def _track_loading(self, parameter: Any, name: str) -> None:
        """Wrap the weight loader of a parameter, to record which weights are loaded.

        When the loader is called, the parameter is removed from `missing_parameters`, and the
        tensor that is being loaded is removed from `_unused_tensors`.
        """
        load = parameter.weight_loader

        # vLLM recognizes its own wrapper by the function's name, and removes it when the layer is
        # complete. `functools.wraps` preserves this name.
        @functools.wraps(load)
        def load_and_record(*args: Any, **kwargs: Any) -> Any:
            self.missing_parameters.discard(name)
            self._unused_tensors.discard(self._current_tensor)
            return load(*args, **kwargs)

        self.missing_parameters.add(name)
        parameter.weight_loader = load_and_record

    def _track_tensors(
        self, tensors: Iterator[tuple[str, Tensor]], counts: Mapping[str, int]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; each counts as unused until a parameter's weight loader is called.

        Args:
            tensors: The tensors with their names.
            counts: Number of received elements of each tensor.
        """
        for name, tensor in tensors:
            if self.recorder is not None:
                self.recorder.receive(name, tensor, counts[name])
            if name.rpartition(".")[2] not in _COPIED_TENSORS:
                self._unused_tensors.add(name)
            # vLLM loads a tensor before it takes the next one from this generator.
            self._current_tensor = name
            yield name, tensor

    def shutdown(self) -> None:
        """Do nothing; the engine owns no resources."""


WeightTransferEngineFactory.register_engine("aligner", SharedMemoryEngine)

# On CPUs, the workers of a replica would communicate through shared memory that remains allocated
# if they are killed. This makes them use gloo instead.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


# vLLM's own method, which `_rotate_on_cpu` wraps and replaces.
_original_rotate = RotaryEmbedding.forward_cpu


def _rotate_on_cpu(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Apply rotary positions to queries and keys, [T, H * D] or [T, H, D].

    vLLM 0.32's kernel for CPUs takes the last dimension for all heads of a token. In queries of
    latent attention, [T, H, D], it therefore rotates only a part of the heads.
    """
    rotate = self.forward_native if query.dim() == 3 else functools.partial(_original_rotate, self)
    rotated: tuple[Tensor, Tensor | None] = rotate(positions, query, key)
    return rotated


RotaryEmbedding.forward_cpu = _rotate_on_cpu

# vLLM's own method, which `_route_on_cpu` wraps and replaces.
_original_routing = CPURouter._compute_routing


def _route_on_cpu(self: CPURouter, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the weights and the indices of each token's experts.

    vLLM 0.32's router for CPUs computes sigmoid scores, and adds a correction bias, only if the
    experts have groups. A single group is equivalent to none.
    """
    if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
        self.use_grouped_topk = True
        self.num_expert_group = 1
        self.topk_group = 1
    routing: tuple[Tensor, Tensor] = _original_routing(self, *args, **kwargs)
    return routing


CPURouter._compute_routing = _route_on_cpu

# vLLM's own method, which `_apply_experts_on_cpu` wraps and replaces.
_original_experts = CPUUnquantizedExperts.apply


def _apply_experts_on_cpu(
    self: CPUUnquantizedExperts,
    *,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    **arguments: Any,
) -> None:
    """Compute the weighted sum of the outputs of this worker's experts, for each token.

    vLLM 0.32's kernel for CPUs ignores `expert_map`: with expert parallelism, it would take the
    index of an expert among all experts for the index among those of this worker.

    Args:
        topk_weights: Weights of each token's experts, [T, K].
        topk_ids: Indices of each token's experts among all experts, [T, K].
        expert_map: Index of each expert among those of this worker, -1 for those of other workers;
            None without expert parallelism.
        arguments: Other arguments of vLLM's method.
    """
    if expert_map is not None:
        own_ids = expert_map[topk_ids]
        topk_weights = topk_weights.where(own_ids >= 0, 0.0)
        topk_ids = own_ids.clamp(min=0).to(topk_ids.dtype)
    _original_experts(
        self,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        **arguments,
    )


CPUUnquantizedExperts.apply = _apply_experts_on_cpu

# vLLM's own method, which `_forward_with_logprobs` wraps and replaces.
_original_forward = Sampler.forward


def _forward_with_logprobs(
    self: Sampler, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any
) -> Any:
    """Run vLLM's sampler, with log-probs at the sampling temperature, over the tokens that grammars
    allow.

    vLLM returns log-probs either before the temperature is applied, or after top-k, top-p and
    min-p. aligner needs log-probs between these two steps.
    """
    grammar_processor.mask_logits(logits, sampling_metadata)
    temperatures = sampling_metadata.temperature
    # vLLM's `forward` calls this method with the logits as the model returned them, because
    # `logprobs_mode` is `raw_logprobs`.
    self.compute_logprobs = functools.partial(_compute_logprobs, temperatures)
    return _original_forward(self, logits, sampling_metadata, *args, **kwargs)


def _compute_logprobs(temperatures: Tensor | None, logits: Tensor) -> Tensor:
    """Return the log-probs [B, V] of the whole distribution at the temperatures, [B] or [1]."""
    scaled = logits.float() if temperatures is None else logits.float() / temperatures[:, None]
    return scaled.log_softmax(-1)


Sampler.forward = _forward_with_logprobs

# vLLM's own method, which `_gather_intermediate_tensors` wraps and replaces.
_original_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def _gather_intermediate_tensors(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Return the hidden states that this worker has received from the previous pipeline stage.

    vLLM 0.32 allocates the memory for them in a dummy run, which it skips on CPUs.
    """
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _original_gather(self, *args, **kwargs)


GPUModelRunner.sync_and_gather_intermediate_tensors = _gather_intermediate_tensors

# vLLM's own method, which `_get_prompt_logprobs` wraps and replaces.
_original_prompt_logprobs = GPUModelRunner._get_prompt_logprobs_dict


def _get_prompt_logprobs(
    self: GPUModelRunner, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, Any]:
    """Return the log-probs of the tokens of prompts, each prompt at the temperature of its request.

    vLLM computes them with the sampler's `compute_logprobs`, which `_forward_with_logprobs` has
    replaced by a function for the tokens that it samples. vLLM itself has one temperature for all
    prompts, 1.
    """
    requests = self.num_prompt_logprobs
    results: dict[str, Any] = {}
    for request_id in [*requests]:
        arguments = self.requests[request_id].sampling_params.extra_args
        temperatures = torch.tensor([arguments["score_temperature"]], device=hidden_states.device)
        self.sampler.compute_logprobs = functools.partial(_compute_logprobs, temperatures)
        # vLLM's method removes a request whose prompt is complete.
        self.num_prompt_logprobs = {request_id: requests[request_id]}
        results |= _original_prompt_logprobs(self, hidden_states, num_scheduled_tokens)
        if not self.num_prompt_logprobs:
            del requests[request_id]
    self.num_prompt_logprobs = requests
    return results


GPUModelRunner._get_prompt_logprobs_dict = _get_prompt_logprobs
grammar_processor.install()
held_weights.install()


class AlignerWorker:
    """Mixin for a vLLM worker; the worker's process imports this module to get it."""

    weight_transfer_engine: SharedMemoryEngine
    model_runner: Any
    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]

    def call_method(self, name: str, **arguments: Any) -> tuple[str | None, Any]:
        """Call a method of the worker, and return the error message, None if it succeeded, and the
        result.

        The errors are returned, because vLLM 0.32 confuses the answers if several workers raise: it
        takes the message of one worker for its answer to the next call.

        Args:
            name: Name of the method.
            arguments: Keyword arguments of the method.
        """
        try:
            return None, getattr(self, name)(**arguments)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}", None

    def begin_update(self, verify: bool) -> None:
        """Start an update.

        Args:
            verify: Whether `find_wrong_weights` is called after the update.
        """
        self.weight_transfer_engine.should_verify = verify
        self.start_weight_update()

    def find_wrong_weights(self) -> list[str]:
        """Return a description of each tensor of the last update that the model does not contain.

        Also computes the checksums with which `find_changed_weights` compares.
        """
        recorder = self.weight_transfer_engine.recorder
        if recorder is None:
            raise ValueError("the last weight update was not recorded")
        self.weight_transfer_engine.recorder = None
        model = self.weight_transfer_engine.model
        self._checksums = held_weights.compute_parameter_checksums(model)
        return recorder.find_wrong()

    def find_changed_weights(self) -> list[str]:
        """Return the names of the parameters that have changed since `find_wrong_weights`."""
        model = self.weight_transfer_engine.model
        checksums = held_weights.compute_parameter_checksums(model)
        return [name for name, value in self._checksums.items() if checksums.get(name) != value]

    def end_update(self) -> None:
        """Finish the update.

        Raises:
            ValueError: A parameter received no weights, or contains NaN; the message names the
                parameters. vLLM would generate with such weights.
        """
        if names := sorted(self.weight_transfer_engine.missing_parameters):
            raise ValueError(f"vLLM's model received no weights for {', '.join(names)}")

        # Set here, because the model runner's batch does not exist when the worker is created.
        grammar_processor.GrammarProcessor.input_batch = self.model_runner.input_batch
        self.finish_weight_update()
        if names := self.weight_transfer_engine.find_nan_parameters():
            raise ValueError(f"vLLM's model has NaN weights in {', '.join(names)}")

    def abandon_update(self) -> None:
        """End an update that will remain incomplete.

        After a failure to load, a worker considers the update as over, but its layers still wait
        for weights. The method therefore marks the update as active and finishes it.
        """
        self._weight_update_active = True
        self.finish_weight_update()
