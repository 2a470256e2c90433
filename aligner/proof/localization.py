"""Names the layer and the parameters that cause a difference to transformers.

Trainer and transformers run the same batch in one process each, and both record the inputs and
outputs of all modules that own a weight. A module is wrong if its input agrees and its output does
not. Parts that are no modules of their own are judged by the modules around them: attention between
the projections, the activation, the weights of the router, and the experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aligner.megatron import world as worlds
from aligner.megatron.named_weights import select_part
from aligner.megatron.packing import PackedBatch
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TensorSpec, weight_table
from aligner.proof.rank_jobs import build_policy
from aligner.proof.reference import make_experience, sequence_lengths

Trace = dict[str, Tensor]
"""Recorded values by their key: tokens of all rows one after another [tokens, features], or sums
over the tokens of an expert [features]."""

_TOLERANCE = 3e-5
"""Relative difference above which a recorded value deviates. Rounding errors are below 1e-5."""
_OBSERVED_PARTS = ("whole", "query", "key", "value", "gate", "up")
_ALL_TOKENS = 2**20  # one micro-batch


@dataclass(frozen=True)
class Culprit:
    """A part of the model that computes something else than transformers."""

    layer: int | None
    """Index of the decoder layer; None outside of the layers."""
    parameters: tuple[str, ...]
    """Names of the weights in the model's files; empty if the part has no weights."""
    reason: str
    """What was observed."""
    error: float
    """Largest difference, relative to the largest value."""

    def describe(self) -> str:
        """Return one line for a user."""
        place = "outside of the layers" if self.layer is None else f"layer {self.layer}"
        names = f": {', '.join(self.parameters)}" if self.parameters else ""
        return f"{place}{names}: {self.reason} (relative difference {self.error:.1g})"


def trace_trainer(directory: str) -> Trace:
    """Return the trace of the trainer on one rank."""
    policy = build_policy(Path(directory), {}, micro_batch_tokens=_ALL_TOKENS)
    runner = policy.runner
    shape = runner.shape
    experience = make_experience(shape.vocab_size)
    (batch,) = runner.pack(experience.tokens, experience.lengths)
    modules = dict(runner.chunks[0].named_modules())
    trace: Trace = {}
    with torch.no_grad(), ExitStack() as hooks:
        for spec in weight_table(shape):
            module = modules.get(spec.parameter.rpartition(".")[0])
            if module is not None and _is_observed(spec):
                hook = _record_trainer_module(trace, spec, shape, batch)
                hooks.callback(module.register_forward_hook(hook).remove)
        for layer, module in enumerate(runner.chunks[0].decoder.layers):
            hooks.callback(_record_layer(trace, layer, module, batch))
            if hasattr(module.mlp, "router"):
                hooks.callback(_record_mixture(trace, layer, module.mlp, batch))
        runner.forward([batch], lambda output, _: output.new_zeros(1, 1))
    worlds.shutdown()
    return trace


def _is_observed(spec: TensorSpec) -> bool:
    """Return whether a trace has the input and output of the module of a weight.

    Embeddings and heads differ in where they apply factors; the inputs of the first layer and the
    log-probs show whether they are right.
    """
    is_weight = spec.parameter.startswith("decoder.") and spec.parameter.endswith(".weight")
    return is_weight and spec.part in _OBSERVED_PARTS


def _record_trainer_module(
    trace: Trace, spec: TensorSpec, shape: ModelShape, batch: PackedBatch
) -> Any:
    """Return a forward hook that records the input and output of a weight's module."""

    def record(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Record output and input of the module, or the sums of an expert's outputs."""
        if isinstance(output, tuple):  # megatron-core's linear layers return a separate bias
            result, bias = output
            output = result if bias is None else result + bias
        if spec.expert is not None:
            part = select_part(output.flatten(0, -2).T, spec.part, shape)
            trace[f"{spec.name} sum"] = part.flatten(0, -2).sum(-1)
            return
        tokens = len(batch.tokens[0])
        values = output.reshape(tokens, -1)
        part = select_part(values.T, spec.part, shape).reshape(-1, tokens).T
        trace[f"{spec.name} output"] = _unpack(part, batch)
        if inputs[0].is_floating_point():
            trace[f"{spec.name} input"] = _unpack(inputs[0].reshape(tokens, -1), batch)

    return record


def _record_layer(trace: Trace, layer: int, module: Any, batch: PackedBatch) -> Any:
    def before(_: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        hidden = inputs[0] if inputs else keywords["hidden_states"]
        trace[f"layer {layer} input"] = _unpack(hidden[:, 0], batch)

    def after(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        trace[f"layer {layer} output"] = _unpack(output[0][:, 0], batch)

    handles = (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    )
    return lambda: [handle.remove() for handle in handles]


def _record_mixture(trace: Trace, layer: int, mlp: Any, batch: PackedBatch) -> Any:
    def route(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        trace[f"layer {layer} routing"] = _unpack(output[0].reshape(-1, output[0].shape[-1]), batch)

    def mix(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        trace[f"layer {layer} mlp input"] = _unpack(inputs[0][:, 0], batch)
        trace[f"layer {layer} mlp output"] = _unpack(output[0][:, 0], batch)

    handles = mlp.router.register_forward_hook(route), mlp.register_forward_hook(mix)
    return lambda: [handle.remove() for handle in handles]


def _unpack(values: Tensor, batch: PackedBatch) -> Tensor:
    """Return the values of packed tokens [T, F] as tokens of all rows one after another."""
    rows = batch.unpack_tokens(values.detach().float())
    order = torch.argsort(torch.as_tensor(batch.batch_rows))
    lengths = sequence_lengths()
    return torch.cat([rows[row, :length] for row, length in zip(order, lengths, strict=True)])


def trace_reference(model: Any, shape: ModelShape) -> Trace:
    """Return the trace of a model of transformers."""
    experience = make_experience(shape.vocab_size)
    modules = dict(model.named_modules())
    rows: dict[str, list[Tensor]] = {}
    table = weight_table(shape)
    first = next(spec for spec in table if spec.layer == 0)
    layers = modules[first.stored_range.name.partition(".0.")[0]]
    experts = _ExpertSums()
    with torch.no_grad(), ExitStack() as hooks:
        for spec in table:
            module = modules.get(spec.stored_range.name.rpartition(".")[0])
            if module is not None and spec.expert is None and _is_observed(spec):
                hook = module.register_forward_hook(_record_reference_module(rows, spec))
                hooks.callback(hook.remove)
        for layer, module in enumerate(layers):
            hooks.callback(_record_reference_layer(rows, layer, module))
            if (mixture := _find_mixture(module)) is not None:
                hooks.callback(_record_reference_mixture(rows, layer, mixture, shape))
                experts.add(layer, mixture.experts)
        hooks.enter_context(experts)
        for row, length in zip(experience.tokens, experience.lengths.tolist(), strict=True):
            model(row[None, :length])
    trace = {key: torch.cat(parts) for key, parts in rows.items()}
    return trace | experts.sums_by_weight(table)


def _record_reference_module(rows: dict[str, list[Tensor]], spec: TensorSpec) -> Any:
    lengths = sequence_lengths()

    def record(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Record the output and the input of one row in transformers' module."""
        # torch's hooks also see modules with other outputs, such as routers
        if not isinstance(output, Tensor) or not inputs:
            return
        outputs = rows.setdefault(f"{spec.name} output", [])
        length = lengths[len(outputs)]
        values = _as_tokens(output, length)
        if (fused := spec.fused_range) is not None and fused.axis is not None:
            values = values[:, fused.start : fused.start + spec.shape[fused.axis]]
        outputs.append(values)
        if inputs[0].is_floating_point():
            tokens = _as_tokens(inputs[0], length)
            rows.setdefault(f"{spec.name} input", []).append(tokens)

    return record


def _as_tokens(values: Tensor, length: int) -> Tensor:
    """Return values of one row of `length` tokens as [tokens, features].

    Norms of single heads get [1, tokens, heads, dim] or, after the transposition, [1, heads,
    tokens, dim].
    """
    values = values.detach()
    if values.dim() == 4:
        is_ambiguous = values.shape[1] == values.shape[2]
        is_transposed = not values.is_contiguous() if is_ambiguous else values.shape[2] == length
        values = values.transpose(1, 2) if is_transposed else values
    return values.reshape(length, -1)


def _record_reference_layer(rows: dict[str, list[Tensor]], layer: int, module: Any) -> Any:
    def record(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        rows.setdefault(f"layer {layer} input", []).append(inputs[0][0])
        rows.setdefault(f"layer {layer} output", []).append(hidden[0])

    return module.register_forward_hook(record).remove


def _find_mixture(layer: Any) -> Any:
    """Return the module of a layer that contains its experts; None for a dense layer."""
    return next((child for child in layer.children() if hasattr(child, "experts")), None)


def _record_reference_mixture(
    rows: dict[str, list[Tensor]], layer: int, mixture: Any, shape: ModelShape
) -> Any:
    def route(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, experts, weights = inputs[:3]
        dense = weights.new_zeros(len(experts), shape.num_experts)
        rows.setdefault(f"layer {layer} routing", []).append(dense.scatter(1, experts, weights))

    def mix(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        size = hidden.shape[-1]
        rows.setdefault(f"layer {layer} mlp input", []).append(inputs[0].reshape(-1, size))
        rows.setdefault(f"layer {layer} mlp output", []).append(hidden.reshape(-1, size))

    handles = (
        mixture.experts.register_forward_hook(route),
        mixture.register_forward_hook(mix),
    )
    return lambda: [handle.remove() for handle in handles]


class _ExpertSums(TorchFunctionMode):
    """Sums over the tokens of each expert of the outputs of its matrices.

    transformers keeps the matrices of all experts in one parameter, which no module of an expert
    owns. This mode sees each matmul with a slice of such a parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, tuple[int, str, Tensor, bool]] = {}
        self._sums: dict[tuple[int, str, int], Tensor] = {}

    def add(self, layer: int, experts: Any) -> None:
        """Observe the experts of a layer."""
        is_concatenated = getattr(experts, "is_concatenated", True)
        for name, parameter in experts.named_parameters():
            if parameter.dim() == 3:
                storage = parameter.untyped_storage().data_ptr()
                self._owners[storage] = layer, name, parameter, is_concatenated

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        """Call the function, and add the result of an expert's matmul to its sum."""
        output = function(*arguments, **(keywords or {}))
        if function.__name__ in ("linear", "matmul", "__matmul__", "mm") and len(arguments) > 1:
            matrix = arguments[1]
            owner = self._owners.get(matrix.untyped_storage().data_ptr())
            if owner is not None and matrix.dim() == 2:
                layer, name, parameter, is_concatenated = owner
                expert = matrix.storage_offset() // parameter[0].numel()
                total = output.detach().sum(0)
                if name == "gate_up_proj":
                    halves = total.chunk(2) if is_concatenated else (total[::2], total[1::2])
                    for part, half in zip(("gate", "up"), halves, strict=True):
                        self._add_sum((layer, part, expert), half)
        return output

    def _add_sum(self, key: tuple[int, str, int], total: Tensor) -> None:
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def sums_by_weight(self, table: Sequence[TensorSpec]) -> Trace:
        """Return the sums by the names of the weights."""
        return {
            f"{spec.name} sum": self._sums[spec.layer, spec.part, spec.expert]
            for spec in table
            if spec.layer is not None
            and spec.expert is not None
            and (spec.layer, spec.part, spec.expert) in self._sums
        }


def find_culprits(found: Trace, expected: Trace, shape: ModelShape) -> list[Culprit]:
    """Return the wrong parts of the first layer whose output deviates, or those before or after
    all layers; empty if the traces agree."""
    table = weight_table(shape)
    if (error := _error(found, expected, "layer 0 input")) > _TOLERANCE:
        names = _names(spec for spec in table if spec.layer is None and "first" in spec.stages)
        return [Culprit(None, names[:1], "the embeddings of the tokens deviate", error)]
    for layer in range(shape.num_layers):
        error = _error(found, expected, f"layer {layer} output")
        if error > _TOLERANCE:
            specs = [spec for spec in table if spec.layer == layer]
            return list(_find_in_layer(found, expected, layer, specs)) or [
                _eliminate(found, layer, specs, error)
            ]
    for spec in table:
        if spec.layer is None and (error := _module_error(found, expected, spec)) > _TOLERANCE:
            return [_blame_module(found, expected, spec, table, error)]
    return []


def _find_in_layer(
    found: Trace, expected: Trace, layer: int, specs: Sequence[TensorSpec]
) -> Iterator[Culprit]:
    """Yield the wrong parts of a layer whose input agrees."""
    for spec in specs:
        if (error := _module_error(found, expected, spec)) > _TOLERANCE:
            yield _blame_module(found, expected, spec, specs, error)
    yield from _check_attention(found, expected, layer, specs)
    yield from _check_activation(found, expected, layer, specs)
    yield from _check_mixture(found, expected, layer, specs)


def _module_error(found: Trace, expected: Trace, spec: TensorSpec) -> float:
    """Return the error of the output of a weight's module if its input agrees, else 0."""
    if _error(found, expected, f"{spec.name} input") > _TOLERANCE:
        return 0.0
    return _error(found, expected, f"{spec.name} output")


def _blame_module(
    found: Trace, expected: Trace, spec: TensorSpec, specs: Sequence[TensorSpec], error: float
) -> Culprit:
    difference = found[f"{spec.name} output"] - expected[f"{spec.name} output"]
    bias = spec.name.removesuffix("weight") + "bias"
    is_constant = bool((difference - difference[0]).abs().max() < 1e-3 * difference.abs().max())
    if is_constant:
        # A wrong bias adds the same vector to each token.
        reason = "its output deviates by the same vector for every token"
        return Culprit(spec.layer, (bias,), reason, error)
    return Culprit(spec.layer, (spec.name,), "its input agrees and its output deviates", error)


def _check_attention(
    found: Trace, expected: Trace, layer: int, specs: Sequence[TensorSpec]
) -> Iterator[Culprit]:
    attention = [spec for spec in specs if ".self_attention." in spec.parameter]
    output = next((spec for spec in attention if ".linear_proj.weight" in spec.parameter), None)
    if output is None:
        return
    key = f"{output.name} input"
    error = _error(found, expected, key)
    before = [spec for spec in attention if ".linear_proj." not in spec.parameter]
    if error <= _TOLERANCE or any(
        _error(found, expected, f"{spec.name} output") > _TOLERANCE for spec in before
    ):
        return
    difference = (found[key] - expected[key]).abs().amax(1)
    wrong = difference > _TOLERANCE * expected[key].abs().max()
    starts = torch.tensor([0, *sequence_lengths()]).cumsum(0)[:-1]
    position = min(
        int(torch.arange(len(wrong))[start:][wrong[start:]].min() - start)
        if wrong[start:].any()
        else len(wrong)
        for start in starts.tolist()
    )
    unseen = _names(spec for spec in before if f"{spec.name} output" not in found)
    unseen = tuple(name for name in unseen if not name.endswith(".bias"))
    if position > 0:
        reason = (
            "queries, keys and values agree, and attention deviates from position"
            f" {position} on: check rotary positions (rope) and the sliding window"
        )
        yield Culprit(layer, (), reason, error)
    else:
        reason = (
            "queries, keys and values agree, and attention deviates from the first token on:"
            " check sinks, and the order of heads"
        )
        yield Culprit(layer, unseen, reason, error)


def _check_activation(
    found: Trace, expected: Trace, layer: int, specs: Sequence[TensorSpec]
) -> Iterator[Culprit]:
    for down in specs:
        if ".linear_fc2.weight" not in down.parameter or down.expert is not None:
            continue
        inputs = down.parameter.replace("linear_fc2", "linear_fc1")
        before = [spec for spec in specs if spec.parameter == inputs]
        error = _error(found, expected, f"{down.name} input")
        if error > _TOLERANCE and all(
            _error(found, expected, f"{spec.name} output") <= _TOLERANCE for spec in before
        ):
            yield Culprit(layer, (), "the activation of the feed-forward network deviates", error)


def _check_mixture(
    found: Trace, expected: Trace, layer: int, specs: Sequence[TensorSpec]
) -> Iterator[Culprit]:
    prefix = f"layer {layer} "
    if _error(found, expected, prefix + "mlp input") > _TOLERANCE:
        return
    if (error := _error(found, expected, prefix + "routing")) > _TOLERANCE:
        names = _names(spec for spec in specs if ".mlp.router." in spec.parameter)
        yield Culprit(layer, names, "the router's weights of the experts deviate", error)
        return
    if (error := _error(found, expected, prefix + "mlp output")) <= _TOLERANCE:
        return
    experts = [spec for spec in specs if spec.expert is not None]
    wrong = [spec for spec in experts if _error(found, expected, f"{spec.name} sum") > _TOLERANCE]
    if wrong:
        reason = "routing agrees, and the output of these matrices of experts deviates"
        yield Culprit(layer, _names(wrong), reason, error)
        return
    shared = [spec for spec in specs if ".shared_experts." in spec.parameter]
    unseen = [spec for spec in shared if f"{spec.name} output" not in found]
    reason = "routing and the other matrices agree, and the output of the experts deviates"
    down = [spec for spec in experts if ".linear_fc2." in spec.parameter]
    yield Culprit(layer, _names(unseen or down), reason, error)


def _eliminate(found: Trace, layer: int, specs: Sequence[TensorSpec], error: float) -> Culprit:
    """Return the culprit if all observed modules of a layer agree."""
    unseen = [
        spec
        for spec in specs
        if f"{spec.name} output" not in found and not spec.name.endswith(".bias")
    ]
    reason = "all observed modules agree: check residual connections and their factors"
    return Culprit(layer, _names(unseen), reason, error)


def _names(specs: Iterator[TensorSpec] | Sequence[TensorSpec]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(spec.name for spec in specs))


def _error(found: Trace, expected: Trace, key: str) -> float:
    """Return the relative error of a recorded value; 0 if the two sides did not record the same."""
    if key not in found or key not in expected:
        return 0.0
    if found[key].shape != expected[key].shape:
        return 0.0
    scale = expected[key].abs().max().clamp_min(1e-30)
    return float((found[key] - expected[key]).abs().max() / scale)


@contextmanager
def quiet_reference() -> Iterator[None]:
    """Hide the warnings of transformers about entries that a small model shrinks."""
    import transformers

    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)
