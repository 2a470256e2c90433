"""Export: Hugging Face models that are loaded, saved as checkpoints and exported again."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from safetensors.torch import load_file

from aligner.data.export import export, find_source
from tests.megatron import checkpoint_jobs as jobs
from tests.megatron import families, reference
from tests.megatron.jobs import make_experience
from tests.rounds import covering

LORA_FAMILIES = [
    name for name in families.CONFIGS if name not in ("llama3", "gpt2", "deepseek_v3-dense")
]
TP2PP2 = {"tensor": 2, "pipeline": 2}


FIRST = ("llama3", "qwen3", "gemma3", "gpt2", "glm4_moe", "deepseek_v3", "gpt-oss", "qwen3_next")
"""Families whose export the first round of tests runs."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A function that returns a family's model directory and creates it once."""
    return functools.cache(lambda family: families.save(family, tmp_path_factory.mktemp(family)))


def tensors(directory):
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@torch.no_grad()
def logits(directory):
    from transformers import AutoModelForCausalLM

    network, details = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    assert not any(details.values()), details
    # Parameters are views of the file, at any address, and the bits of a product depend on whether
    # the address is a multiple of 64.
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()
    return network.eval()(make_experience(72).tokens).logits


@pytest.mark.promise("export-round-trip-is-exact")
@pytest.mark.parametrize("family", covering(families.CONFIGS, FIRST, families.parts))
def test_exported_tensors_and_logits_equal_source_model(pool, model, tmp_path, family):
    layout = TP2PP2 | (
        {"sequence": True, "expert": 2, "expert_tensor": 1} if family in families.MIXTURES else {}
    )
    pool.run(jobs.save, 4, str(model(family)), {"parallel": layout}, str(tmp_path / "policy"))
    notices = export(find_source(tmp_path / "policy"), tmp_path / "export", max_shard_bytes=100_000)
    assert notices == [f"no tokenizer was copied: {model(family)} has no tokenizer files"]
    assert_same_tensors(tensors(tmp_path / "export"), tensors(model(family)))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert (
        len(set(index["weight_map"].values()))
        == len(list((tmp_path / "export").glob("*.safetensors")))
        > 1
    )
    assert torch.equal(logits(tmp_path / "export"), logits(model(family)))


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen3", {}),
        ("llama3", {"rank": 4, "alpha": 6.0}),
        ("gpt2", {"rank": 4, "alpha": 6.0}),
        ("deepseek_v3-dense", {"rank": 4, "alpha": 6.0}),
        *covering(
            [(family, {"rank": 4, "alpha": 6.0}) for family in LORA_FAMILIES],
            (),
            lambda row: families.parts(row[0]),
        ),
    ],
)
def test_exported_policy_logprobs_equal_transformers(pool, model, tmp_path, family, lora):
    from transformers import AutoModelForCausalLM

    settings = {"parallel": {"tensor": 2}, "lora": lora}
    if family in families.MIXTURES:
        settings = {"parallel": {"data": 2}, "lora": lora | {"targets": ["attention"]}}
    logprobs = pool.run(jobs.save, 2, str(model(family)), settings, str(tmp_path / "policy"), 3)[0]
    export(find_source(tmp_path / "policy"), tmp_path / "export")
    experience = make_experience(72)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        expected = reference.logprobs(network, experience.tokens, experience.lengths)
        before = AutoModelForCausalLM.from_pretrained(model(family)).eval()
        untrained = reference.logprobs(before, experience.tokens, experience.lengths)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untrained).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llama2", "qwen3", "gpt2", "pythia", "mixtral", "deepseek_v3"])
def test_exported_critic_values_equal_transformers(pool, model, tmp_path, family):
    from transformers import AutoModelForSequenceClassification

    values = pool.run(
        jobs.save_critic, 2, str(model(family)), {"pipeline": 2}, 2, str(tmp_path / "critic")
    )[0]
    export(find_source(tmp_path / "critic"), tmp_path / "export")
    network, details = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "export", output_loading_info=True
    )
    assert not any(details.values()), details
    experience = make_experience(72)
    for row, length in enumerate(experience.lengths.tolist()):
        tokens = experience.tokens[row, None, :length]
        with torch.no_grad():
            last = network.eval()(tokens, attention_mask=torch.ones_like(tokens)).logits
        assert last.item() == pytest.approx(values[row, length - 1].item(), rel=1e-4, abs=1e-5)
    assert values.abs().max() > 1e-3
