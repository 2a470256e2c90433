"""A small random model, and the results of transformers and torch for it in one process."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aligner.algorithms.policy_losses import policy_loss
from aligner.data.types import Experience, build_response_mask
from aligner.schema import OptimizerConfig

TEMPERATURE = 0.7
STEPS = 3
"""Number of optimizer updates of a proof."""
# Epsilon is far above the rounding errors of gradients that are almost zero, such as those of key
# biases, and below most other gradients. With a smaller one, Adam would turn these errors into
# large steps, so that different summation orders give different weights.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3, beta2=0.95, epsilon=1e-4, clip_grad_norm=0.5, schedule="constant"
)
_ROUNDING_SAMPLES = 4
_WEIGHT_CHANGE = 1e-6

Results = Mapping[str, Any]
"""Results of `train_reference`."""


def write_random_model(config: Mapping[str, Any], directory: Path, seed: int) -> None:
    """Write a random model to a directory, with transformers.

    Norms and biases differ from ones and zeros, so that reading only the defaults changes the
    results.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config_class = transformers.CONFIG_MAPPING[config["model_type"]]
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(config_class.from_dict(dict(config))).float()
    for name, parameter in model.named_parameters():
        # the biases of all experts of a layer are one matrix
        if parameter.ndim == 1 or name.endswith("bias"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    for buffer in find_stored_buffers(model).values():
        buffer += 0.1 * torch.randn_like(buffer)
    model.save_pretrained(directory)


def load_reference(directory: Path) -> Any:
    """Return the model of transformers in float32, with its plain implementations."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def find_stored_buffers(model: Any) -> dict[str, Tensor]:
    """Return the buffers that the model's files contain, such as correction biases of routers."""
    stored = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def make_experience(vocab_size: int, batch: int = 6, seed: int = 3) -> Experience:
    """Return random experience over sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 15, (batch,), generator=generator)
    prompt_lengths = torch.randint(1, 5, (batch,), generator=generator)
    width = int(lengths.max())
    tokens = torch.randint(2, vocab_size, (batch, width), generator=generator)
    tokens = torch.where(torch.arange(width) < lengths[:, None], tokens, 0)
    mask = build_response_mask(lengths, prompt_lengths, width)
    old = -4 + 0.1 * torch.randn(batch, width - 1, generator=generator)
    reference, values, rewards, advantages, returns = (
        torch.where(mask, torch.randn(batch, width - 1, generator=generator), 0.0) for _ in range(5)
    )
    return Experience(
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        prompt_lengths=prompt_lengths,
        engine_logprobs=old,
        weight_versions=torch.zeros_like(mask, dtype=torch.int64),
        finish_reasons=torch.zeros_like(lengths),
        groups=torch.arange(batch) // 2,
        scores=rewards.sum(1),
        rewards=rewards,
        values=values,
        old_logprobs=torch.where(mask, old, 0.0),
        reference_logprobs=reference,
        advantages=advantages,
        returns=returns,
    )


def sequence_lengths() -> list[int]:
    """Return the lengths of the sequences of a proof, which do not depend on the vocabulary."""
    lengths: list[int] = make_experience(1024).lengths.tolist()
    return lengths


def compute_loss(
    logprobs: Tensor, entropy: Tensor, experience: Experience, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss of a proof, a `PolicyLoss`."""
    return policy_loss(
        logprobs,
        experience.old_logprobs,
        experience.advantages,
        experience.mask,
        denominator=denominator,
    )


def compute_logprobs(model: Any, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return log-probs [B, S-1] at `TEMPERATURE`, row by row; zeros past each sequence."""
    rows = []
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        logits = model(row[None, :length]).logits[0, :-1]
        logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(-1, row[1:length, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (0, tokens.shape[1] - length)))
    return torch.stack(rows)


def train_reference(
    model: Any, experience: Experience, settings: OptimizerConfig
) -> dict[str, Any]:
    """Train a model of transformers with torch's AdamW for `STEPS` updates.

    Returns:
        `logprobs` [B, S-1], `loss`, `grad_norm` and `gradients` of the first update before
        clipping, and `weights` after all updates. Gradients and weights are keyed by the names of
        the model's files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=0.0,
    )
    result: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        logprobs = compute_logprobs(model, experience.tokens, experience.lengths)
        loss, _ = compute_loss(logprobs, logprobs, experience, float(experience.mask.sum()))
        loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm)
        if step == 0:
            result = {
                "logprobs": logprobs.detach(),
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "gradients": revert_weight_conversion(model, gradients),
            }
        optimizer.step()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights |= find_stored_buffers(model)
    return result | {"weights": revert_weight_conversion(model, weights)}


def measure_rounding(
    load: Callable[[], Any],
    run: Callable[[Any], Results],
    compute_errors: Callable[[Results, Results], Mapping[str, float]],
) -> dict[str, float]:
    """Return the rounding errors of transformers in float32: the largest ones of a few samples.

    They are the differences to float64. In each sample, the weights differ from those of the model
    by a few units in the last place, so that other rounding errors occur. A single sample often has
    small errors by chance, above all in tensors with few elements.

    Args:
        load: Returns a new float32 model of transformers.
        run: Returns the results of a model in its precision.
        compute_errors: Returns the error of each result, from results and exact results.

    Returns:
        The rounding error of each result, by the keys of `compute_errors`.
    """
    generator = torch.Generator().manual_seed(1)
    largest: dict[str, float] = {}
    for _ in range(_ROUNDING_SAMPLES):
        model = load()
        wide_model = load()
        pairs = zip(model.parameters(), wide_model.parameters(), strict=True)
        with torch.no_grad():
            for weight, wide_weight in pairs:
                weight *= 1 + _WEIGHT_CHANGE * torch.randn(weight.shape, generator=generator)
                wide_weight.copy_(weight)
        results = run(model)
        with _ComputeInFloat64():
            exact_results = run(wide_model.double())
        for what, error in compute_errors(results, exact_results).items():
            largest[what] = max(largest.get(what, 0.0), error)
    return largest


class _ComputeInFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, such as in norms, softmax and routers."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        """Call a function of torch, with float64 instead of float32."""
        if function is Tensor.float:
            function = Tensor.double
        wide_keywords = {key: _widen(value) for key, value in (keywords or {}).items()}
        return function(*map(_widen, arguments), **wide_keywords)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def generate_greedily(model: Any, prompt: Tensor, count: int) -> list[int]:
    """Return the next `count` tokens of transformers' greedy decoding, also after EOS tokens."""
    tokens = prompt[None]
    generated = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()


def with_changes(changes: Mapping[str, Any]) -> OptimizerConfig:
    """Return the optimizer of a proof with other values of some keys."""
    return dataclasses.replace(OPTIMIZER, **changes)
