"""Extension of vLLM's workers: receives weights and adapts the sampler.

vLLM's workers import this module. A worker receives its weights through memory that the trainer's
rank of the same tensor-parallel index shares.

A worker gets only the slices that it needs, each in a tensor of the whole shape. vLLM slices, fuses
and pads these tensors in the same way as tensors from a file. The platform of the worker may store
loaded weights differently, for example as packed copies; these are made when the update ends.
"""

import functools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from weight_memory import checksum, opened, taken


@dataclass
class Nothing(WeightTransferInitInfo):
    """Initialization data of the weight transfer, which is empty."""


@dataclass
class SharedPieces(WeightTransferUpdateInfo):
    """Some of the model's tensors, as one message of a weight update."""

    of_ranks: dict[str, dict[str, Any]]
    """Handles of `weight_memory.SharedPieces` by the tensor-parallel rank that needs the slices.

    The keys are strings, since the handles are sent as JSON.
    """


class SharedMemoryEngine(WeightTransferEngine[Nothing, SharedPieces]):
    """Weight transfer engine of vLLM that loads tensors from shared memory.

    It verifies the checksum of the memory before it loads the tensors. It also checks that an
    update contains every parameter, and only tensors that the model has.
    """

    init_info_cls = Nothing
    update_info_cls = SharedPieces
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing; the transfer needs no initialization."""

    def start_weight_update(self) -> None:
        """Prepare all layers for new weights.

        vLLM processes the weights of a layer as soon as the layer is complete.
        """
        # During the update, vLLM treats tied parameters as separate ones. They share one name here,
        # the first one, because the update contains the weights of only one of them.
        first_names: dict[int, str] = {}
        named = self.model.named_parameters(remove_duplicate=False)
        tied_names = {
            name: first_names.setdefault(id(parameter), name) for name, parameter in named
        }
        initialize_layerwise_reload(self.model)
        self.unfilled: set[str] = set()
        """Names of the parameters that have not received weights in this update."""
        self._of_no_use: set[str] = set()
        """Names of the received tensors that vLLM has not loaded into any parameter."""
        for name, parameter in self.model.named_parameters():
            if name.rpartition(".")[2] not in SKIP_LOAD_TENSORS:
                self._notice(parameter, tied_names.get(name, name))
        if self.device.type == "cpu":
            # vLLM 0.32 packs experts only if they have no kernel yet, that is, only in the first
            # update. Deleting the kernel is safe, since there are no CUDA graphs with its address.
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None

    def finish_weight_update(self) -> None:
        """Finish the update after all tensors have been received."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # An output layer that is tied to the embedding receives no weights of its own. vLLM
            # therefore keeps its old packed copy, which must be made again here.
            weights: set[int] = set()
            for module in self.model.modules():
                weight = getattr(module, "weight", None)
                if id(weight) in weights:
                    module.quant_method.process_weights_after_loading(module)
                elif weight is not None:
                    weights.add(id(weight))

    def receive_weights(self, update_info: SharedPieces) -> None:
        """Load the tensors of one message.

        Raises:
            ValueError: The checksum of the memory differs, this worker cannot open the memory, or
                the model has no parameter for a tensor.
        """
        handle = update_info.of_ranks[str(get_tensor_model_parallel_rank())]
        with opened(handle["memory"], self.device) as memory:
            if (actual := checksum(memory)) != handle["checksum"]:
                raise ValueError(
                    f"the received weights have checksum {actual:016x}, expected"
                    f" {handle['checksum']:016x}"
                )
            self.model.load_weights(self._noticed(taken(memory, handle["pieces"], self.device)))
        if self._of_no_use:
            raise ValueError(
                f"vLLM's model has no parameter for {', '.join(sorted(self._of_no_use))}"
            )

    def without_numbers(self) -> list[str]:
        """Return the names of the parameters that contain NaN.

        Weights that a CPU worker has packed are not checked.
        """
        return [
            name for name, parameter in self.model.named_parameters() if parameter.isnan().any()
        ]

    def _notice(self, parameter: Any, name: str) -> None:
        """Wrap the weight loader of a parameter, to record which weights are loaded.

        When the loader is called, the parameter is removed from `unfilled`, and the tensor that is
        being loaded is removed from `_of_no_use`.
        """
        load = parameter.weight_loader

        # vLLM recognizes its own wrapper by the function's name, and removes it when the layer is
        # complete. `functools.wraps` preserves this name.
        @functools.wraps(load)
        def noticed(*args: Any, **named: Any) -> Any:
            self.unfilled.discard(name)
            self._of_no_use.discard(self._last)
            return load(*args, **named)

        self.unfilled.add(name)
        parameter.weight_loader = noticed

    def _noticed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors; each counts as unused until a parameter's weight loader is called."""
        for name, tensor in tensors:
            self._of_no_use.add(name)
            # vLLM loads a tensor before it takes the next one from this generator.
            self._last = name
            yield name, tensor

    def shutdown(self) -> None:
        """Do nothing; the engine owns no resources."""


WeightTransferEngineFactory.register_engine("aligner", SharedMemoryEngine)

# On CPUs, the workers of a replica would communicate through shared memory that remains allocated
# if they are killed. This makes them use gloo instead.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


# vLLM's own method, which `_sample` wraps and replaces.
_forward = Sampler.forward


def _sample(
    self: Sampler, logits: Tensor, sampling_metadata: SamplingMetadata, *more: Any, **named: Any
) -> Any:
    """Run vLLM's sampler, with log-probs at the sampling temperature.

    vLLM returns log-probs either before the temperature is applied, or after top-k, top-p and
    min-p. aligner needs log-probs between these two steps.
    """
    temperatures = sampling_metadata.temperature
    self.compute_logprobs = functools.partial(_at_temperature, temperatures)
    return _forward(self, logits, sampling_metadata, *more, **named)


def _at_temperature(temperatures: Tensor | None, logits: Tensor) -> Tensor:
    """Return the log-probs [B, V] of the whole distribution at the sampling temperature."""
    scaled = logits.float() if temperatures is None else logits.float() / temperatures[:, None]
    return scaled.log_softmax(-1)


Sampler.forward = _sample


class AlignerWorker:
    """Mixin for a vLLM worker; the worker's process imports this module to get it."""

    weight_transfer_engine: SharedMemoryEngine
    finish_weight_update: Callable[[], None]

    def attempt(self, what: str, **arguments: Any) -> str | None:
        """Call a method of the worker, and return the error message, or None if it succeeded.

        The errors are returned, because vLLM 0.32 confuses the answers if several workers raise: it
        takes the message of one worker for its answer to the next call.

        Args:
            what: Name of the method.
            arguments: Keyword arguments of the method.
        """
        try:
            getattr(self, what)(**arguments)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def end_update(self) -> None:
        """Finish the update.

        Raises:
            ValueError: A parameter received no weights, or contains NaN; the message names the
                parameters. vLLM would generate with such weights.
        """
        if names := sorted(self.weight_transfer_engine.unfilled):
            raise ValueError(f"vLLM's model received no weights for {', '.join(names)}")
        self.finish_weight_update()
        if names := self.weight_transfer_engine.without_numbers():
            raise ValueError(f"vLLM's model has NaN weights in {', '.join(names)}")

    def give_up(self) -> None:
        """End an update that will remain incomplete.

        After a failure to load, a worker considers the update as over, but its layers still wait
        for weights. The method therefore marks the update as active and finishes it.
        """
        self._weight_update_active = True
        self.finish_weight_update()
