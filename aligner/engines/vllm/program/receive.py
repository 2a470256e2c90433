"""What vLLM's workers import of ours: the receiving side of weights, in memory that the rank in a
worker's place shares.

A worker has the slices that are its own, each in a tensor of the whole shape: vLLM cuts, fuses and
pads it as it would a file's. What the worker's platform makes of loaded weights (a packed copy,
another layout) is made when the update ends.
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
    """There is nothing to set up."""


@dataclass
class SharedPieces(WeightTransferUpdateInfo):
    """Some of the model's tensors."""

    of_ranks: dict[str, dict[str, Any]]
    """Handles of `weight_memory.SharedPieces`, by the tensor-parallel rank whose slices they are.
    """


class SharedMemoryEngine(WeightTransferEngine[Nothing, SharedPieces]):
    """Loads what the trainer's side wrote, after its checksum has been found right."""

    init_info_cls = Nothing
    update_info_cls = SharedPieces
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing."""

    def start_weight_update(self) -> None:
        """Layers take new weights one by one, and are processed when theirs are complete."""
        first: dict[int, str] = {}
        # tied ones are apart until the update ends
        named = self.model.named_parameters(remove_duplicate=False)
        one_of = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        initialize_layerwise_reload(self.model)
        self.unfilled: set[str] = set()
        self._of_no_use: set[str] = set()
        for name, parameter in self.model.named_parameters():
            if name.rpartition(".")[2] not in SKIP_LOAD_TENSORS:
                self._notice(parameter, one_of.get(name, name))
        if self.device.type == "cpu":
            # vLLM 0.32 packs experts the first time only, and then when they have no kernel. No
            # graph knows its address here.
            for module in self.model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None

    def finish_weight_update(self) -> None:
        """All have come."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A head that is tied to the embedding gets nothing itself, so that vLLM leaves the copy
            # that it has packed.
            weights: set[int] = set()
            for module in self.model.modules():
                weight = getattr(module, "weight", None)
                if id(weight) in weights:
                    module.quant_method.process_weights_after_loading(module)
                elif weight is not None:
                    weights.add(id(weight))

    def receive_weights(self, update_info: SharedPieces) -> None:
        """Raises ValueError where bytes were damaged on the way, or this worker cannot open the
        memory."""
        handle = update_info.of_ranks[str(get_tensor_model_parallel_rank())]
        with opened(handle["memory"], self.device) as memory:
            if (found := checksum(memory)) != handle["checksum"]:
                raise ValueError(
                    f"the received weights have checksum {found:016x}, expected"
                    f" {handle['checksum']:016x}"
                )
            self.model.load_weights(self._noticed(taken(memory, handle["pieces"], self.device)))
        if self._of_no_use:
            raise ValueError(
                f"vLLM's model has no parameter for {', '.join(sorted(self._of_no_use))}"
            )

    def without_numbers(self) -> list[str]:
        """Parameters with a NaN in them. Those that a CPU's worker has packed are not looked
        into."""
        return [
            name for name, parameter in self.model.named_parameters() if parameter.isnan().any()
        ]

    def _notice(self, parameter: Any, name: str) -> None:
        """Strike the parameter off those without weights, and what is loaded into it off what is of
        no use."""
        load = parameter.weight_loader

        # vLLM tells its own wrapper by the name, and takes it off when the layer is complete
        @functools.wraps(load)
        def noticed(*args: Any, **named: Any) -> Any:
            self.unfilled.discard(name)
            self._of_no_use.discard(self._last)
            return load(*args, **named)

        self.unfilled.add(name)
        parameter.weight_loader = noticed

    def _noticed(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._of_no_use.add(name)
            self._last = name  # vLLM loads one before it asks for the next
            yield name, tensor

    def shutdown(self) -> None:
        """Nothing."""


WeightTransferEngineFactory.register_engine("aligner", SharedMemoryEngine)

# On CPUs the workers of a replica would exchange messages in memory that stays behind when they are
# killed; so they use gloo.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


_forward = Sampler.forward


def _sample(
    self: Sampler, logits: Tensor, sampling_metadata: SamplingMetadata, *more: Any, **named: Any
) -> Any:
    """vLLM tells log-probs before the temperature, or after all that leaves tokens out; ours are
    between the two."""
    temperatures = sampling_metadata.temperature
    self.compute_logprobs = functools.partial(_at_temperature, temperatures)
    return _forward(self, logits, sampling_metadata, *more, **named)


def _at_temperature(temperatures: Tensor | None, logits: Tensor) -> Tensor:
    """Log-probs [B, V] of the whole distribution."""
    scaled = logits.float() if temperatures is None else logits.float() / temperatures[:, None]
    return scaled.log_softmax(-1)


Sampler.forward = _sample


class AlignerWorker:
    """Mixed into a worker, whose process imports this module for it."""

    weight_transfer_engine: SharedMemoryEngine
    finish_weight_update: Callable[[], None]

    def attempt(self, what: str, **arguments: Any) -> str | None:
        """Call a method of the worker's; returns what went wrong.

        Where several workers raise, vLLM 0.32 takes what one of them says for its answer to the
        next call.
        """
        try:
            getattr(self, what)(**arguments)
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
        return None

    def end_update(self) -> None:
        """Raises ValueError naming parameters without weights, or whose weights are not all
        numbers: vLLM would serve them."""
        if names := sorted(self.weight_transfer_engine.unfilled):
            raise ValueError(f"vLLM's model received no weights for {', '.join(names)}")
        self.finish_weight_update()
        if names := self.weight_transfer_engine.without_numbers():
            raise ValueError(f"vLLM's model has NaN weights in {', '.join(names)}")

    def give_up(self) -> None:
        """End an update that will not be complete. For a worker that failed to load it is over, but
        its layers still wait."""
        self._weight_update_active = True
        self.finish_weight_update()
