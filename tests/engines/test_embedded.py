"""The embedded engine compared with transformers, and with itself in other batches and layouts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from aligner.data.types import Prompt, Sample
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table
from aligner.schema import EngineConfig, EngineParallelConfig
from tests.engines.engines import generate, load_directory

LENGTHS = (3, 7, 1, 7, 5)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request, tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tied=request.param)


FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "mistral": {"sliding_window": 4},  # shorter than prompts and responses
    "qwen2": {},
    "qwen3": {"head_dim": 12},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def odd_directory(request, tmp_path_factory) -> Path:
    """A model whose vocabulary size is odd, so that two tensor-parallel ranks must pad it."""
    settings = {"tie_word_embeddings": request.param, "vocab_size": 201}
    return save_model(tmp_path_factory.mktemp("odd"), "llama", **settings)


@pytest.fixture(scope="module", params=["tied", "untied", *FAMILIES])
def any_directory(request, tmp_path_factory) -> Path:
    """Tied and untied Llamas, and a model of each family in FAMILIES."""
    path = tmp_path_factory.mktemp(request.param)
    if request.param not in FAMILIES:
        return save_llama(path, tied=request.param == "tied")
    return save_model(path, request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def tied_directory(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("tied"), tied=True)


def save_llama(path: Path, tied: bool, **save_options) -> Path:
    return save_model(path, "llama", save_options, tie_word_embeddings=tied)


def save_model(path: Path, family: str, save_options: dict | None = None, **settings) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 200,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | settings))
    for name, parameter in model.named_parameters():
        # Ones and zeros would hide omitted or exchanged parameters.
        if "norm" in name or "bias" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(path, **save_options or {})
    return path


def shape_of(directory: Path) -> ModelShape:
    return read_config(json.loads((directory / "config.json").read_text()), str(directory))


def settings_of(tensor: int = 1, **settings) -> EngineConfig:
    return EngineConfig(parallel=EngineParallelConfig(tensor=tensor, data=1), **settings)


def make_engine(
    directory: Path, tensor: int = 1, rank: int = 0, group=None, seed: int = 7, **settings
) -> EmbeddedEngine:
    engine = EmbeddedEngine(shape_of(directory), settings_of(tensor, **settings), rank, seed, group)
    load_directory(engine, directory)
    return engine


def make_prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    return [
        Prompt(index, "", torch.randint(0, 200, (length,), generator=generator))
        for index, length in enumerate(LENGTHS)
    ]


def make_requests(samples: int = 1) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt, index) for prompt in make_prompts() for index in range(samples)
    ]


def response(sample: Sample) -> list[int]:
    return sample.tokens[sample.prompt_length :].tolist()


def load_transformers(directory: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.promise("greedy-text-equals-transformers")
def test_greedy_tokens_equal_transformers_at_mixed_lengths(any_directory):
    model = load_transformers(any_directory)
    samples = generate(
        make_engine(any_directory), make_requests(), SamplingOptions(12, greedy=True)
    )
    for prompt, sample in zip(make_prompts(), samples, strict=True):
        wanted = model.generate(
            prompt.tokens[None], max_new_tokens=12, do_sample=False, pad_token_id=0
        )[0]
        assert sample.tokens.tolist() == wanted.tolist()
        assert sample.prompt_length == len(prompt.tokens)
        assert sample.finish_reason == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_full_forward_pass(any_directory, temperature):
    model = load_transformers(any_directory)
    for sample in generate(
        make_engine(any_directory), make_requests(3), SamplingOptions(10, temperature)
    ):
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        wanted = (
            (logits / temperature)
            .log_softmax(-1)
            .gather(1, sample.tokens[sample.prompt_length :, None])
            .squeeze(1)
        )
        torch.testing.assert_close(sample.engine_logprobs, wanted, atol=1e-4, rtol=0)


@pytest.mark.promise("samples-independent-of-batch")
def test_sample_does_not_depend_on_its_batch(tied_directory):
    requests = make_requests(4)
    options = SamplingOptions(12)
    batched = generate(make_engine(tied_directory), requests, options)
    assert len({tuple(response(sample)) for sample in batched[:4]}) == 4
    backwards = generate(make_engine(tied_directory, batch_size=7), requests[::-1], options)[::-1]
    for request, one, other in zip(requests, batched, backwards, strict=True):
        (alone,) = generate(make_engine(tied_directory, batch_size=1), [request], options)
        assert response(one) == response(other) == response(alone)
        assert (one.prompt_id, one.sample_index) == (request.prompt.id, request.sample_index)
        torch.testing.assert_close(one.engine_logprobs, alone.engine_logprobs, atol=1e-5, rtol=0)


def test_seed_changes_samples_and_length_limit_does_not(tied_directory):
    short = generate(make_engine(tied_directory), make_requests(2), SamplingOptions(5))
    long = generate(make_engine(tied_directory), make_requests(2), SamplingOptions(9))
    other = generate(make_engine(tied_directory, seed=8), make_requests(2), SamplingOptions(5))
    assert [response(sample) for sample in short] == [response(sample)[:5] for sample in long]
    assert [response(sample) for sample in short] != [response(sample) for sample in other]


def generate_on_rank(
    directory: Path, samples: int, options: SamplingOptions
) -> list[tuple[list[int], list[float]]]:
    import torch.distributed as dist

    engine = make_engine(directory, tensor=2, rank=dist.get_rank(), group=dist.group.WORLD)
    responses = generate(engine, make_requests(samples), options)
    return [(response(sample), sample.engine_logprobs.tolist()) for sample in responses]


@pytest.mark.promise("samples-independent-of-batch")
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_tensor_parallel_samples_equal_one_rank(pool, directory, greedy):
    # Most responses end at a stop token, so that both ranks must compact the batch identically.
    options = SamplingOptions(12, greedy=greedy, stop_token_ids=tuple(range(0, 200, 9)))
    first, _ = pool.run(generate_on_rank, 2, directory, 2, options)
    for (tokens, logprobs), alone in zip(
        first, generate(make_engine(directory), make_requests(2), options), strict=True
    ):
        assert tokens == response(alone)
        torch.testing.assert_close(torch.tensor(logprobs), alone.engine_logprobs, atol=1e-4, rtol=0)


@pytest.mark.promise("padded-vocabulary-trains-alike")
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_padded_vocabulary_samples_equal_one_rank(pool, odd_directory, greedy):
    options = SamplingOptions(12, greedy=greedy)
    first, _ = pool.run(generate_on_rank, 2, odd_directory, 2, options)
    alone = generate(make_engine(odd_directory), make_requests(2), options)
    for (tokens, logprobs), sample in zip(first, alone, strict=True):
        assert tokens == response(sample)
        torch.testing.assert_close(
            torch.tensor(logprobs), sample.engine_logprobs, atol=1e-4, rtol=0
        )


def test_stop_tokens_end_otherwise_unchanged_responses(tied_directory):
    engine = make_engine(tied_directory)
    stops = tuple(range(0, 200, 8))
    requests = make_requests(6)
    free = generate(engine, requests, SamplingOptions(20))
    stopped = generate(engine, requests, SamplingOptions(20, stop_token_ids=stops))
    assert {sample.finish_reason for sample in stopped} == {"stop", "length"}
    for unlimited, sample in zip(free, stopped, strict=True):
        tokens = response(unlimited)
        ends = [at for at, token in enumerate(tokens) if token in stops]
        wanted = tokens[: ends[0] + 1] if ends else tokens
        assert response(sample) == wanted
        assert sample.finish_reason == ("stop" if ends else "length")
        torch.testing.assert_close(
            sample.engine_logprobs, unlimited.engine_logprobs[: len(wanted)], atol=1e-5, rtol=0
        )


def test_update_changes_tokens_and_weight_versions(tied_directory):
    engine = make_engine(tied_directory)
    options = SamplingOptions(4, greedy=True)
    before = generate(engine, make_requests(), options)
    update = engine.begin_update(5)
    for name, view in update.views(list(engine._weights.views)).items():
        view.copy_(
            engine._weights.views[name] * 0.5 if view.dim() == 2 else engine._weights.views[name]
        )
    update.views(["model.embed_tokens.weight"])["model.embed_tokens.weight"].copy_(
        torch.randn(200, 32)
    )
    update.load(list(engine._weights.views))
    update.commit()
    after = generate(engine, make_requests(), options)
    assert all(sample.weight_versions.tolist() == [0] * 4 for sample in before)
    assert all(sample.weight_versions.tolist() == [5] * 4 for sample in after)
    assert [response(sample) for sample in before] != [response(sample) for sample in after]


def test_weight_views_equal_weight_table(any_directory):
    from safetensors.torch import load_file

    engine = make_engine(any_directory)
    stored = load_file(any_directory / "model.safetensors")
    assert {name: tuple(view.shape) for name, view in engine._weights.views.items()} == {
        spec.name: spec.shape for spec in weight_table(shape_of(any_directory))
    }
    for name, view in engine._weights.views.items():
        assert torch.equal(view, stored[name]), name


def test_sharded_directory_loads_like_single_file(tied_directory, tmp_path):
    sharded = save_llama(tmp_path, tied=True, max_shard_size="30KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    options = SamplingOptions(6, greedy=True)
    one, other = (
        generate(make_engine(path), make_requests(), options) for path in (tied_directory, sharded)
    )
    assert [response(sample) for sample in one] == [response(sample) for sample in other]


def test_engine_logprobs_can_be_used_in_autograd(tied_directory):
    sample = generate(make_engine(tied_directory), make_requests(), SamplingOptions(3))[0]
    weight = torch.ones(3, requires_grad=True)
    (weight * sample.engine_logprobs).sum().backward()
    assert torch.equal(weight.grad, sample.engine_logprobs)


def test_invalid_request_is_refused_before_generation(tied_directory):
    engine = make_engine(tied_directory)
    long = GenerationRequest(Prompt(41, "", torch.zeros(60, dtype=torch.int64)), 0)
    with pytest.raises(
        AlignerError, match=r"prompt 41 has 60 tokens; with max_new_tokens=5 .* 64 positions"
    ):
        generate(engine, [*make_requests(), long], SamplingOptions(5))
    (sample,) = generate(engine, [long], SamplingOptions(4))
    assert len(sample.tokens) == 64
    with pytest.raises(AlignerError, match="prompt 42 is empty"):
        generate(
            engine,
            [GenerationRequest(Prompt(42, "", torch.zeros(0, dtype=torch.int64)), 0)],
            SamplingOptions(4),
        )
    with pytest.raises(AlignerError, match="prompt 43 has token ids from 5 to 200"):
        generate(
            engine,
            [GenerationRequest(Prompt(43, "", torch.tensor([5, 200])), 0)],
            SamplingOptions(4),
        )
    with pytest.raises(AlignerError, match="max_new_tokens=0"):
        generate(engine, make_requests(), SamplingOptions(0))


def test_engine_without_weights_refuses_generation(tied_directory):
    engine = EmbeddedEngine(shape_of(tied_directory), EngineConfig(), 0, 1)
    with pytest.raises(AlignerError, match="no weights: no weight sync has completed yet"):
        generate(engine, make_requests(), SamplingOptions(2))


def test_indivisible_key_value_heads_are_refused(tied_directory):
    shape = dataclasses.replace(shape_of(tied_directory), num_heads=12, num_kv_heads=6)
    with pytest.raises(
        ConfigError,
        match=r"engine.parallel.tensor=4: must divide the model's 6 key-value heads or be a",
    ):
        EmbeddedEngine(shape, settings_of(tensor=4), 0, 1)


def test_directory_of_other_shape_is_refused(tied_directory, tmp_path):
    untied = dataclasses.replace(shape_of(tied_directory), tied_embeddings=False)
    with pytest.raises(AlignerError, match=r"lm_head\.weight .* is missing"):
        load_directory(EmbeddedEngine(untied, EngineConfig(), 0, 1), tied_directory)
    wider = dataclasses.replace(shape_of(tied_directory), ffn_hidden_size=64)
    with pytest.raises(
        AlignerError, match=r"gate_proj\.weight has shape \(48, 32\), expected \(64, 32\)"
    ):
        load_directory(EmbeddedEngine(wider, EngineConfig(), 0, 1), tied_directory)
    with pytest.raises(AlignerError, match=r"neither model.safetensors nor"):
        load_directory(make_engine(tied_directory), tmp_path)
