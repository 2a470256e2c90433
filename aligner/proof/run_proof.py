"""The proof of a model: a small random model of it, run by transformers, trainer and engine."""

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.export import export, find_source
from aligner.errors import ConfigError
from aligner.models.hugging_face import read_config
from aligner.models.layouts import layout_problems, tensor_problems
from aligner.models.shape import ModelShape
from aligner.proof.comparison import (
    TOLERANCE,
    Check,
    check_tensors,
    choose_tolerance,
    compute_slice_errors,
    compute_tensor_errors,
    find_first_wrong_layer,
    may_be_rounding,
)
from aligner.proof.gloo_worlds import RunRanks, run_ranks
from aligner.proof.localization import (
    Culprit,
    find_culprits,
    trace_reference,
    trace_trainer,
)
from aligner.proof.rank_jobs import NEW_TOKENS, make_prompts, run_engine, run_trainer
from aligner.proof.reference import (
    OPTIMIZER,
    Results,
    generate_greedily,
    load_reference,
    make_experience,
    measure_rounding,
    train_reference,
    write_random_model,
)
from aligner.proof.shrink import fit_stages, remove_quantization, shrink_config
from aligner.schema import ParallelConfig

_LAYER_TOLERANCE = 3e-5
_SEED = 11
# Patterns of the values of a layout that are not numbers, and their descriptions in errors.
_VALUE_PATTERNS = {
    "sequence": ("true|false", "true or false"),
    "stage_layers": (
        r"\[ *[1-9]\d*(?:, *[1-9]\d*)* *\]",
        "a list of integers > 0, such as [16,16,15,14]",
    ),
}
_NUM_CULPRITS = 3
_LOGPROBS = "log-probs"
_NORM = "gradient norm"
_TENSORS = {"gradients": "gradients", "weights": "weights after 3 updates"}
"""Names of the checks of tensors, by their keys in the results."""


@dataclass
class LayoutProof:
    """The checks of one layout, and the causes of the failed ones."""

    layout: str
    """Sizes of the layout, such as `tensor=2,pipeline=2`."""
    checks: list[Check] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    """What deviates first: layers and parameters."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all checks have passed."""
        return all(check.passed for check in self.checks)


@dataclass
class Proof:
    """The result of `aligner prove` for a model."""

    model: str
    small_config: dict[str, Any]
    """config.json of the small model."""
    layouts: list[LayoutProof]

    @property
    def passed(self) -> bool:
        """Whether all checks at all layouts have passed."""
        return all(layout.passed for layout in self.layouts)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the command's JSON output."""
        return {
            "model": self.model,
            "passed": self.passed,
            "layouts": [
                {
                    "layout": proof.layout,
                    "passed": proof.passed,
                    "seconds": round(proof.seconds, 1),
                    "checks": [asdict(check) | {"passed": check.passed} for check in proof.checks],
                    "causes": proof.causes,
                }
                for proof in self.layouts
            ],
            "small_config": self.small_config,
        }


class _Reference:
    """The results of transformers for the small model, each computed once."""

    def __init__(self, directory: Path, shape: ModelShape) -> None:
        self.directory = directory
        self.shape = shape
        model = load_reference(directory)
        experience = make_experience(shape.vocab_size)
        self.trace = trace_reference(model, shape)
        self.layers = self._unpack_layers(experience.lengths.tolist(), experience.tokens.shape[1])
        self.greedy = [
            generate_greedily(model, prompt.tokens, NEW_TOKENS)
            for prompt in make_prompts(shape.vocab_size)
        ]
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.steps = train_reference(model, experience, OPTIMIZER)

    @functools.cached_property
    def tolerances(self) -> dict[str, float]:
        """Tolerances of the results of the trainer, which consider the rounding of transformers."""
        experience = make_experience(self.shape.vocab_size)
        rounding = measure_rounding(
            lambda: load_reference(self.directory),
            lambda model: train_reference(model, experience, OPTIMIZER),
            _compute_errors,
        )
        return {what: choose_tolerance(error) for what, error in rounding.items()}

    def _unpack_layers(self, lengths: Sequence[int], width: int) -> Tensor:
        """Return the outputs of the layers as [layers, B, S, H]."""
        whole = torch.zeros(self.shape.num_layers, len(lengths), width, self.shape.hidden_size)
        for layer in range(self.shape.num_layers):
            rows = self.trace[f"layer {layer} output"].split(lengths)
            for row, values in enumerate(rows):
                whole[layer, row, : len(values)] = values
        return whole


def parse_layout(text: str) -> ParallelConfig:
    """Return the layout that a text such as `tensor=2,pipeline=2` describes; empty is one rank.

    Raises:
        ConfigError: A key is unknown, or a value is invalid.
    """
    names = ParallelConfig.__dataclass_fields__
    values: dict[str, Any] = {}
    # Commas inside of brackets separate the numbers of stage_layers.
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):
        key, _, value = part.partition("=")
        if key not in names:
            raise ConfigError(f"--layout {text}: unknown key {key!r}; allowed: {', '.join(names)}")
        pattern, allowed = _VALUE_PATTERNS.get(key, (r"[1-9]\d*", "an integer > 0"))
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"--layout {text}: {key}={value}: must be {allowed}")
        values[key] = json.loads(value)
    return ParallelConfig(**values)


def prove(
    config: Mapping[str, Any],
    name: str,
    layouts: Sequence[ParallelConfig],
    workspace: Path,
    *,
    ranks: RunRanks = run_ranks,
    report: Callable[[str], None] = lambda line: None,
) -> Proof:
    """Compare trainer and engine with transformers, for a small random model of a configuration.

    Args:
        config: Content of the model's config.json.
        name: Name of the model, for errors and results.
        layouts: Layouts of the trainer; the engine has their tensor-parallel sizes.
        workspace: Empty directory for the small model and its checkpoints.
        ranks: Function that runs a function on the ranks of a world.
        report: Called with one line about the current phase.

    Raises:
        ConfigError: The model is not supported, or not at one of the layouts.
    """
    model_shape = read_config(remove_quantization(config), name)
    _check_layouts(layouts, model_shape)
    small = shrink_config(config, layouts, name)
    shape = read_config(small, name)
    small_layouts = [fit_stages(layout, model_shape, shape.num_layers) for layout in layouts]
    _check_layouts(small_layouts, shape)

    report("transformers")
    directory = workspace / "model"
    write_random_model(small, directory, _SEED)
    reference = _Reference(directory, shape)
    engines: dict[int, list[Check]] = {}
    proofs = []
    for index, (layout, small_layout) in enumerate(zip(layouts, small_layouts, strict=True)):
        start = time.monotonic()
        proof = LayoutProof(format_layout(layout))
        report(f"trainer: {proof.layout}")
        checkpoint = workspace / f"checkpoint_{index}"
        sizes = asdict(small_layout)
        results = ranks(run_trainer, layout.ranks, str(directory), sizes, str(checkpoint))
        proof.checks += _check_trainer(results, reference)
        proof.checks.append(_check_export(checkpoint, workspace / f"export_{index}", reference))
        size = 1 if list(tensor_problems("", layout.tensor, shape)) else layout.tensor
        if size not in engines:
            report(f"engine: tensor={size}")
            engines[size] = _check_engine(ranks(run_engine, size, str(directory), size), reference)
        proof.checks += engines[size]
        if not proof.passed:
            report("locating the difference")
            proof.causes = _find_causes(results, reference, proof, ranks)
        proof.seconds = time.monotonic() - start
        proofs.append(proof)
    return Proof(name, small, proofs)


def _check_layouts(layouts: Sequence[ParallelConfig], shape: ModelShape) -> None:
    """Raise ConfigError if a model cannot run at one of the layouts."""
    for layout in layouts:
        if problems := list(layout_problems("--layout", layout, shape)):
            raise ConfigError("\n".join(problems).replace("--layout.", "--layout "))


def format_layout(layout: ParallelConfig) -> str:
    """Return the sizes of a layout that are not the defaults, such as `tensor=2,pipeline=2`."""
    default = ParallelConfig()
    parts = [
        f"{key}={json.dumps(value, separators=(',', ':'))}"
        for key, value in asdict(layout).items()
        if value != getattr(default, key)
    ]
    return ",".join(parts) or "one rank"


def _check_trainer(results: Sequence[Mapping[str, Any]], reference: _Reference) -> list[Check]:
    expected = reference.steps
    errors = {
        _LOGPROBS: max(
            _largest_difference(each["logprobs"], expected["logprobs"]) for each in results
        ),
        _NORM: max(abs(each["stats"]["grad_norm"] / expected["grad_norm"] - 1) for each in results),
    }
    for kind in _TENSORS:
        parts = [each[kind] for each in results]
        found = compute_slice_errors(reference.shape, parts, expected[kind])
        errors |= {f"{kind}: {name}": error for name, error in found.items()}
    tolerances = dict.fromkeys(errors, TOLERANCE)
    if may_be_rounding(errors.values()):
        tolerances = reference.tolerances
    checks = [Check(name, errors[name], tolerances[name]) for name in (_LOGPROBS, _NORM)]
    for kind, title in _TENSORS.items():
        prefix = f"{kind}: "
        chosen = {what: error for what, error in errors.items() if what.startswith(prefix)}
        check = check_tensors(title, chosen, tolerances)
        checks.append(replace(check, worst=check.worst.removeprefix(prefix)))
    return checks


def _compute_errors(results: Results, expected: Results) -> dict[str, float]:
    """Return the errors of results of transformers, by the keys of `_Reference.tolerances`."""
    errors = {
        _LOGPROBS: _largest_difference(results["logprobs"], expected["logprobs"]),
        _NORM: abs(results["grad_norm"] / expected["grad_norm"] - 1),
    }
    for kind in _TENSORS:
        tensors = compute_tensor_errors(results[kind], expected[kind])
        errors |= {f"{kind}: {name}": error for name, error in tensors.items()}
    return errors


def _largest_difference(found: Any, expected: Tensor) -> float:
    return float((torch.as_tensor(found) - expected).abs().max())


def _check_engine(results: Sequence[Mapping[str, Any]], reference: _Reference) -> list[Check]:
    error = max(each["error"] for each in results)
    tolerance = reference.tolerances[_LOGPROBS] if may_be_rounding([error]) else TOLERANCE
    wrong = sum(
        found != expected
        for each in results
        for found, expected in zip(each["tokens"], reference.greedy, strict=True)
    )
    return [
        Check(f"engine {_LOGPROBS}", error, tolerance),
        Check("greedy responses that differ", float(wrong), 0.0),
    ]


def _check_export(checkpoint: Path, output: Path, reference: _Reference) -> Check:
    """Check that the exported model loads in transformers and has the same weights."""
    import transformers

    export(find_source(checkpoint), output)
    model, details = transformers.AutoModelForCausalLM.from_pretrained(
        output, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    name = "export round trip"
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if problems := details.get(key):
            return Check(name, float("inf"), 0.0, f"{key}: {sorted(map(str, problems))[0]}")
    found = model.state_dict()
    errors = {
        key: _largest_difference(found[key], tensor) for key, tensor in reference.weights.items()
    }
    return check_tensors(name, errors, dict.fromkeys(errors, 0.0))


def _find_causes(
    results: Sequence[Mapping[str, Any]],
    reference: _Reference,
    proof: LayoutProof,
    ranks: RunRanks,
) -> list[str]:
    """Return what deviates first, one line each."""
    failed = {check.name for check in proof.checks if not check.passed}
    (trace,) = ranks(trace_trainer, 1, str(reference.directory))
    found = {key: torch.as_tensor(value) for key, value in trace.items()}
    culprits = find_culprits(found, reference.trace, reference.shape)
    if culprits:
        return [culprit.describe() for culprit in culprits]

    # One rank agrees, so that the layout, the head or the backward pass causes the difference.
    layer = find_first_wrong_layer(
        torch.as_tensor(results[0]["layers"]), reference.layers, _LAYER_TOLERANCE
    )
    lines = []
    if layer is not None:
        lines.append(
            f"layer {layer[0]}: its output is the first that deviates at {proof.layout}, and agrees"
            f" on one rank (relative difference {layer[1]:.1g})"
        )
    elif _LOGPROBS in failed:
        head = Culprit(
            None,
            _find_head(reference.shape),
            "the log-probs deviate, and the final hidden states agree",
            float("nan"),
        )
        lines.append(head.describe())
    if "gradients" in failed:
        lines += _rank_gradients(results, reference)
    if not lines:
        lines.append(
            "the trainer's forward and backward passes agree with transformers: "
            + ", ".join(sorted(failed))
        )
    return lines


def _find_head(shape: ModelShape) -> tuple[str, ...]:
    from aligner.models.weight_slices import weight_table

    specs = [spec for spec in weight_table(shape) if spec.layer is None and "last" in spec.stages]
    return tuple(spec.name for spec in specs if not spec.parameter.startswith("decoder."))


def _rank_gradients(results: Sequence[Mapping[str, Any]], reference: _Reference) -> list[str]:
    """Return the parameters whose gradients deviate most."""
    errors = compute_slice_errors(
        reference.shape, [each["gradients"] for each in results], reference.steps["gradients"]
    )
    worst = sorted(errors, key=lambda name: -errors[name])[:_NUM_CULPRITS]
    return [
        f"{name}: its gradient deviates (relative difference {errors[name]:.1g})" for name in worst
    ]
