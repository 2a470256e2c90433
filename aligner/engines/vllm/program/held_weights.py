"""Verification that the parameters of vLLM's model contain the weights of an update.

vLLM's weight loaders slice the tensors of an update, and copy the slices into fused parameters such
as `qkv_proj.weight` or `w13_weight`. `LoadRecorder` observes these copies, so that it knows which
part of which parameter must contain which slice, for every model. When a layer is complete, the
recorder reads the slices back from the layer's parameters, and compares them bit by bit with the
received ones.

On CPUs, and with some kernels for experts on GPUs, vLLM converts the weights of a layer to another
form. Their slices are compared directly before the conversion.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from weight_memory import compute_tensor_checksum

# Integer data type by element size in bytes.
_BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Source:
    """Memory that contains values of received tensors."""

    names: frozenset[str]
    """Names of the received tensors; several if an operation has combined them."""
    size: int
    """Number of bytes. Another size means that the memory was freed and is used for other values.
    """


@dataclass(frozen=True)
class _Copy:
    """A slice of received tensors that a weight loader has copied into a parameter."""

    names: frozenset[str]
    """Names of the received tensors."""
    source: Tensor
    """The slice."""
    parameter: str
    """Name of the parameter in its layer."""
    offset: int
    """Index of the first element in the parameter's memory."""
    stride: tuple[int, ...]
    """Strides of the slice in the parameter."""

    def is_held_by(self, layer: nn.Module) -> bool:
        """Return whether the parameter contains the slice, bit by bit.

        This is false if the layer has replaced the parameter by one with another layout.
        """
        parameter: Tensor | None = getattr(layer, self.parameter, None)
        if parameter is None or parameter.is_meta:
            return False
        start = parameter.storage_offset() + self.offset
        steps = (
            (size - 1) * stride for size, stride in zip(self.source.shape, self.stride, strict=True)
        )
        end = start + sum(steps) + 1
        if end * parameter.element_size() > parameter.untyped_storage().nbytes():
            return False
        held = parameter.data.as_strided(self.source.shape, self.stride, start)
        # A parameter in float32 may have received values of a smaller data type.
        bits_dtype = _BITS_DTYPES[self.source.element_size()]
        held_bits = held.to(self.source.dtype).contiguous().view(bits_dtype)
        return torch.equal(held_bits, self.source.contiguous().view(bits_dtype))


class LoadRecorder(TorchDispatchMode):
    """Recorder of the copies of an update into the parameters of a model.

    Attributes:
        wrong: Descriptions of the received tensors that a parameter does not contain.
        converted: Names of the layers whose weights vLLM has converted to another form.
    """

    def __init__(self, model: nn.Module) -> None:
        """Create the recorder of one update."""
        super().__init__()
        self._model = model
        self._layer_names = {id(module): name for name, module in model.named_modules()}
        self._sources: dict[int, _Source] = {}
        """Memory with received values, by its address."""
        self._layer: nn.Module | None = None
        """Layer that is being loaded; None outside of vLLM's layerwise loading."""
        self._copies: list[_Copy] = []
        """Copies into the parameters of this layer."""
        self._is_suspended = False
        self._missing_elements: dict[str, int] = {}
        """Number of elements of each received tensor that were not copied into a parameter."""
        self.wrong: list[str] = []
        self.converted: list[str] = []

    def receive(self, name: str, tensor: Tensor, numel: int) -> None:
        """Record that a tensor was received.

        Args:
            name: Name of the tensor in the checkpoint.
            tensor: The tensor, which is whole.
            numel: Number of its elements that were received; the others are NaN.
        """
        self._missing_elements[name] = numel
        self._add_source(tensor, frozenset([name]))

    def find_wrong(self) -> list[str]:
        """Return a description of each received tensor that the model does not contain, at the end
        of the update."""
        missing = [
            f"{name} ({count} elements were not loaded)"
            for name, count in self._missing_elements.items()
            if count > 0
        ]
        return sorted(self.wrong) + sorted(missing)

    @contextmanager
    def load_layer(self, layer: nn.Module) -> Iterator[None]:
        """Compare the parameters of a layer that is loaded in the `with` block."""
        outer = (self._layer, self._copies)
        self._layer, self._copies = layer, []
        quant_method: Any = getattr(layer, "quant_method", None)
        process = getattr(quant_method, "process_weights_after_loading", None)
        is_converted = False

        def process_and_compare(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_converted
            self._compare(layer)
            result = process(*args, **kwargs)  # type: ignore[misc]
            with self._suspended():
                is_converted = not all(copy.is_held_by(layer) for copy in self._copies)
            return result

        try:
            if process is not None:
                quant_method.process_weights_after_loading = process_and_compare
            yield
            if is_converted:
                self.converted.append(self._layer_names.get(id(layer), ""))
            else:
                # From the final parameters, to which vLLM has copied the loaded ones.
                self._compare(layer)
        finally:
            if process is not None:
                del quant_method.process_weights_after_loading
            self._layer, self._copies = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of PyTorch, and record where it copies received values."""
        result = func(*args, **(kwargs or {}))
        if self._is_suspended or not self._sources:
            return result
        if func is torch.ops.aten.copy_.default:
            self._record_copy(args[0], args[1])
        elif isinstance(result, Tensor) and not result.is_meta:
            self._record_derived(result, args)
        return result

    def _record_copy(self, target: Tensor, source: Tensor) -> None:
        names = self._get_names(source)
        if not names or target.is_meta:
            return
        location = self._locate(target)
        if location is None:
            # Another tensor than a parameter, such as a temporary one.
            self._add_source(target, names)
            return
        layer, parameter = location
        copy = _Copy(
            names,
            source.expand(target.shape),
            parameter,
            target.storage_offset() - getattr(layer, parameter).storage_offset(),
            target.stride(),
        )
        for name in names:
            # The parts of combined tensors cannot be counted.
            count = source.numel() if len(names) == 1 else self._missing_elements[name]
            self._missing_elements[name] -= count
        if layer is self._layer:
            self._copies.append(copy)
        elif not copy.is_held_by(layer):
            self._add_wrong(layer, copy)

    def _record_derived(self, result: Tensor, args: tuple[Any, ...]) -> None:
        """Record that a new tensor contains received values, for example in another data type."""
        tensors = [each for each in args if isinstance(each, Tensor)]
        tensors += [
            each
            for arg in args
            if isinstance(arg, (list, tuple))
            for each in arg
            if isinstance(each, Tensor)
        ]
        address = result.untyped_storage().data_ptr()
        if any(address == _get_address(each) for each in tensors):
            return  # a view, or the result of an operation in place
        names = frozenset[str]().union(*(self._get_names(each) for each in tensors))
        if names:
            self._add_source(result, names)
        else:
            # The memory may have contained received values before.
            self._sources.pop(address, None)

    def _locate(self, target: Tensor) -> tuple[nn.Module, str] | None:
        """Return the layer and the name of the parameter whose memory contains a tensor."""
        address = target.untyped_storage().data_ptr()
        loaded_layers = [] if self._layer is None else [self._layer]
        for layer in (*loaded_layers, *self._model.modules()):
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if (
                    tensor is not None
                    and not tensor.is_meta
                    and tensor.untyped_storage().data_ptr() == address
                ):
                    return layer, name
        return None

    def _compare(self, layer: nn.Module) -> None:
        """Compare the copies into a layer with its parameters."""
        with self._suspended():
            for copy in self._copies:
                if not copy.is_held_by(layer):
                    self._add_wrong(layer, copy)

    def _add_wrong(self, layer: nn.Module, copy: _Copy) -> None:
        parameter = f"{self._layer_names.get(id(layer), '')}.{copy.parameter}".removeprefix(".")
        for name in copy.names:
            description = f"{name} (in {parameter})"
            if description not in self.wrong:
                self.wrong.append(description)

    def _add_source(self, tensor: Tensor, names: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        self._sources[storage.data_ptr()] = _Source(names, storage.nbytes())

    def _get_names(self, tensor: Tensor) -> frozenset[str]:
        """Return the names of the received tensors whose values a tensor contains."""
        if tensor.is_meta:
            return frozenset()
        storage = tensor.untyped_storage()
        source = self._sources.get(storage.data_ptr())
        is_known = source is not None and source.size == storage.nbytes()
        return source.names if source is not None and is_known else frozenset()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """Record nothing in the `with` block."""
        was_suspended = self._is_suspended
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = was_suspended


def _get_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None if it has none."""
    return None if tensor.is_meta else tensor.untyped_storage().data_ptr()


def compute_parameter_checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of the memory of each parameter of a model, by its name in vLLM."""
    return {
        name: compute_tensor_checksum(parameter.data)
        for name, parameter in model.named_parameters()
        if parameter.numel()
    }


@functools.cache
def install() -> None:
    """Let vLLM's layerwise loading tell the recorder of the current update which layer it loads."""
    from vllm.model_executor.model_loader.reload import layerwise

    original = layerwise._layerwise_process

    @functools.wraps(original)
    def process_layer(layer: nn.Module, info: Any) -> None:
        recorder = get_recorder()
        if recorder is None:
            original(layer, info)
            return
        with recorder.load_layer(layer):
            original(layer, info)

    layerwise._layerwise_process = process_layer


_recorders: list[LoadRecorder] = []


def get_recorder() -> LoadRecorder | None:
    """Return the recorder of the current update; None if the update is not verified."""
    return _recorders[-1] if _recorders else None


@contextmanager
def recording(recorder: LoadRecorder | None) -> Iterator[None]:
    """Record the copies in the `with` block; None records nothing."""
    if recorder is None:
        yield
        return
    _recorders.append(recorder)
    try:
        with recorder:
            yield
    finally:
        _recorders.pop()
