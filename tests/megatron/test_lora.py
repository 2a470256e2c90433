"""LoRA adapters at every layout equal transformers with the weight W + (alpha / rank) B A."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call

from aligner.data.model_directory import read_shape
from aligner.megatron.lora import initialize_lora_a
from aligner.models.weight_slices import build_adapter_map, build_adapter_table, weight_table
from aligner.schema import LoraConfig, ParallelConfig
from tests.megatron import families, jobs, optimizer_jobs
from tests.megatron.reference import logprobs

LORA = LoraConfig(rank=4, alpha=6.0)
# Epsilon is above the rounding noise of gradients, and the learning rate moves the adapters far
# from their initial values.
OPTIMIZER = {"learning_rate": 2e-2, "epsilon": 1e-3, "clip_grad_norm": 0.5, "schedule": "constant"}
STEPS = 3
TP, SEQUENCE, PP, DP = {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"data": 2}
CASES = [
    *(
        ("llama3", layout, {})
        for layout in ({}, TP, SEQUENCE, PP, DP, SEQUENCE | PP, PP | {"virtual_pipeline": 2})
    ),
    ("llama3", SEQUENCE, {"recompute": "full"}),
    ("llama3", DP, {"optimizer": {"distributed": True}}),
    *((family, SEQUENCE, {}) for family in ("qwen2", "gpt2", "pythia", "llama-bias")),
    ("mixtral", {"expert": 2, "data": 2}, {}),
    *(("deepseek_v3-dense", layout, {}) for layout in (SEQUENCE, TP, {})),
    # more tensor ranks than KV heads
    ("llama3", {"tensor": 4}, {}),
    ("qwen2", {"tensor": 4, "sequence": True}, {}),
    ("qwen3_5", SEQUENCE, {}),
    ("gpt-oss", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, {}),
    ("deepseek_v3", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, {}),
]
TYPICAL = (0, 5, 8, 10, 13, 14)
"""Indices of the cases that the first round of tests runs."""
IDS = [
    "-".join([family, *(f"{key}{value}" for key, value in (layout | more).items())])
    for family, layout, more in CASES
]


def lora_of(family):
    return dataclasses.replace(LORA, targets=["attention"]) if family in families.MIXTURES else LORA


class Adapted(torch.nn.Module):
    """A transformers model whose adapted tensors are frozen tensors plus LoRA products."""

    def __init__(self, directory, lora):
        from transformers import AutoModelForCausalLM

        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.model, self.config = model.eval().requires_grad_(False), model.config
        self.adapters, self.scale = (
            build_adapter_map(weight_table(read_shape(directory)), lora),
            lora.alpha / lora.rank,
        )
        self.factors = {}
        for spec in build_adapter_table(self.adapters):
            start = (
                initialize_lora_a(spec, seed=1)
                if spec.name.endswith(".lora_A.weight")
                else torch.zeros(spec.shape)
            )
            self.factors[spec.name] = start.requires_grad_()

    def merged(self):
        """Return the merged tensors by their names in the file; adapters of one fused tensor are
        consecutive in the table."""
        parts, own = {}, dict(self.model.named_parameters())
        for adapter in self.adapters.values():
            product = self.scale * (self.factors[adapter.up.name] @ self.factors[adapter.down.name])
            stored = adapter.weight.stored_range
            parts.setdefault((stored.name, stored.axis or 0), []).append(
                product.T if adapter.weight.is_transposed else product
            )
        return {
            name: own[name] + torch.cat(products, axis) for (name, axis), products in parts.items()
        }

    def forward(self, tokens):
        return functional_call(self.model, self.merged(), (tokens,))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A function that returns a family's directory and the results of training its adapters with
    torch's optimizer, computed once."""

    @functools.cache
    def make(family):
        directory = families.save(family, tmp_path_factory.mktemp(family))
        return directory, reference_steps(directory, lora_of(family))

    return make


def reference_steps(directory, lora):
    model = Adapted(directory, lora)
    experience = jobs.make_experience(model.config.vocab_size)
    adam = dataclasses.replace(jobs.OPTIMIZER, **OPTIMIZER)
    optimizer = torch.optim.AdamW(
        model.factors.values(),
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.epsilon,
        weight_decay=0.0,
    )
    with torch.no_grad():
        first = logprobs(model.model, experience.tokens, experience.lengths)
    stats, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        given = logprobs(model, experience.tokens, experience.lengths)
        value, _ = jobs.loss(given, given, experience, float(experience.mask.sum()))
        value.backward()
        gradients.append({name: factor.grad.clone() for name, factor in model.factors.items()})
        norm = torch.nn.utils.clip_grad_norm_(model.factors.values(), adam.clip_grad_norm)
        stats.append({"loss": value.item(), "grad_norm": float(norm)})
        optimizer.step()
    with torch.no_grad():
        return {
            "logprobs": first,
            "stats": stats,
            "gradients": gradients,
            "after_logprobs": logprobs(model, experience.tokens, experience.lengths),
            "factors": {name: factor.detach() for name, factor in model.factors.items()},
            "merged": {name: tensor.detach() for name, tensor in model.merged().items()},
            "stored": load_file(directory / "model.safetensors"),
            "table": {spec.name: spec for spec in weight_table(read_shape(directory))},
        }


def assert_slices_close(part, tensors, tolerance):
    """Assert that a rank's slices equal the whole tensors', relative to the largest element."""
    for name, (cut, found) in part.items():
        whole = tensors[name]
        wanted = (
            whole if cut.axis is None else whole.narrow(cut.axis, cut.start, cut.stop - cut.start)
        )
        torch.testing.assert_close(
            found,
            wanted,
            rtol=0,
            atol=tolerance * float(whole.abs().max()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


ROWS = [
    pytest.param(*case, id=name, marks=() if place in TYPICAL else pytest.mark.slow)
    for place, (case, name) in enumerate(zip(CASES, IDS, strict=True))
]


@pytest.mark.promise("lora-equals-one-process")
@pytest.mark.parametrize(("family", "layout", "more"), ROWS)
def test_lora_training_equals_single_process(pool, expected, family, layout, more):
    directory, wanted = expected(family)
    settings = more | {"lora": lora_of(family), "optimizer": OPTIMIZER | more.get("optimizer", {})}
    ranks = ParallelConfig(**layout).ranks
    results = pool.run(
        optimizer_jobs.adapted_policy, ranks, str(directory), layout, settings, STEPS
    )
    for result in results:
        for key in ("logprobs", "after_logprobs"):
            torch.testing.assert_close(result[key], wanted[key], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result["reference"], wanted["logprobs"], rtol=1e-4, atol=1e-4)
        for stats, reference in zip(result["stats"], wanted["stats"], strict=True):
            assert {key: stats[key] for key in reference} == pytest.approx(reference, rel=1e-4)
        for seen, gradients in zip(result["gradients"], wanted["gradients"], strict=True):
            assert_slices_close(seen, gradients, 1e-4)
        assert_slices_close(result["adapters"], wanted["factors"], 1e-4)
        assert result["base_untouched"]
        assert (
            result["buffered"]
            < 1.5 * sum(tensor.numel() for _, tensor in result["adapters"].values()) + 1000
        )
        check_merged(result["merged"], wanted)
    assert set().union(*(result["adapters"] for result in results)) == set(wanted["factors"])
    moved = (wanted["after_logprobs"] - wanted["logprobs"]).abs().max()
    assert moved > 0.1, "the adapters matter"


def check_merged(merged, wanted):
    """Assert that merged weights are W + (alpha / rank) B A, and that weights without adapters are
    unchanged."""
    adapted = {
        name for name, spec in wanted["table"].items() if spec.stored_range.name in wanted["merged"]
    }
    for name, (cut, found) in merged.items():
        stored = wanted["table"][name].stored_range
        whole = (wanted["merged"] if name in adapted else wanted["stored"])[stored.name]
        whole = whole[stored.locate(wanted["table"][name].shape)]
        assert_slices_close({name: (cut, found)}, {name: whole}, 1e-4 if name in adapted else 0)


def test_initial_adapters_do_not_change_merged_weights(pool, expected):
    directory, wanted = expected("llama3")
    settings = {"lora": LORA, "optimizer": OPTIMIZER}
    whole = {}
    for layout in ({}, TP):
        for result in pool.run(
            optimizer_jobs.adapted_policy,
            ParallelConfig(**layout).ranks,
            str(directory),
            layout,
            settings,
            0,
        ):
            if not layout:
                whole = {name: tensor for name, (_, tensor) in result["fresh"].items()}
            assert_slices_close(result["fresh"], whole, 0)  # every layout starts alike

            for name, (_, tensor) in result["fresh"].items():
                bound = 1 / math.sqrt(wanted["factors"][name].shape[1])
                if name.endswith(".lora_B.weight"):
                    assert not tensor.any(), name
                else:
                    assert 0.9 * bound < tensor.abs().max() <= bound, name
                    assert abs(float(tensor.mean())) < 0.2 * bound, name
            for name, (cut, tensor) in result["merged"].items():
                assert_slices_close({name: (cut, tensor)}, wanted["stored"], 0)


def test_trained_lora_policy_publishes_merged_weights(pool, expected):
    directory, wanted = expected("llama3")
    settings = {"lora": LORA, "optimizer": OPTIMIZER}
    for views in pool.run(
        optimizer_jobs.publish_trained_policy, 2, str(directory), TP, settings, STEPS
    ):
        assert set(views) == set(wanted["table"])
        for name, tensor in views.items():
            whole = wanted["merged"].get(name, wanted["stored"][name])
            assert_slices_close({name: (SimpleNamespace(axis=None), tensor)}, {name: whole}, 1e-4)


def test_adapter_checkpoint_resumes_at_another_layout(pool, expected, tmp_path):
    directory, wanted = expected("llama3")
    settings = {"lora": LORA, "optimizer": OPTIMIZER}
    for layout, resume in ((SEQUENCE, False), (DP, True), (PP, True)):
        call = (str(directory), layout, settings, str(tmp_path / "policy"), resume)
        for result in pool.run(optimizer_jobs.adapted_checkpoint, 2, *call):
            for key, value in wanted["stats"][2].items():
                assert result["stats"][key] == pytest.approx(value, rel=1e-4)
            assert_slices_close(result["adapters"], wanted["factors"], 1e-4)
