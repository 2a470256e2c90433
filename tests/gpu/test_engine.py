"""The embedded engine on one CUDA device: bf16, CUDA graphs, sleep, and in-place updates."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.models.weight_slices import weight_table
from aligner.resharding.publisher import Publisher
from aligner.resharding.transfer_plan import plan_resharding
from aligner.resharding.transport import Link
from aligner.schema import EngineConfig, ParallelConfig
from tests.engines.engines import generate, load_directory
from tests.engines.test_embedded import (
    load_transformers,
    make_prompts,
    make_requests,
    response,
    save_model,
    shape_of,
)
from tests.gpu.conftest import DEVICE, FAMILIES, needs_cuda, needs_device
from tests.megatron import families

pytestmark = needs_device

OPTIONS = SamplingOptions(12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


def make_engine(directory: Path, **settings) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        shape_of(directory), EngineConfig(**settings), rank=0, seed=7, device=DEVICE
    )
    load_directory(engine, directory)
    return engine


def differences(directory: Path, samples) -> torch.Tensor:
    """Return each log-prob's absolute difference to transformers in fp32 on the CPU."""
    model, found = load_transformers(directory), []
    for sample in samples:
        with torch.no_grad():
            logits = model(sample.tokens[None]).logits[0, sample.prompt_length - 1 : -1]
        wanted = (
            logits.log_softmax(-1).gather(1, sample.tokens[sample.prompt_length :, None]).squeeze(1)
        )
        found.append((sample.engine_logprobs - wanted).abs())
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logprobs_of_every_family_equal_transformers(tmp_path, family, precision):
    path = families.save(family, tmp_path)
    options = SamplingOptions(8)
    vocabulary = shape_of(path).vocab_size
    prompts = [
        dataclasses.replace(prompt, tokens=prompt.tokens % vocabulary) for prompt in make_prompts()
    ]
    requests = [GenerationRequest(prompt, index) for prompt in prompts for index in range(2)]
    samples = generate(make_engine(path, precision=precision), requests, options)
    difference = differences(path, samples)
    assert (difference.max() < 1e-4) if precision == "fp32" else (difference.mean() < 5e-2)


@needs_cuda
def test_cuda_graph_samples_equal_eager_samples(directory):
    recorded = make_engine(directory, precision="fp32")
    samples = generate(recorded, make_requests(4), OPTIONS)
    plain = generate(
        make_engine(directory, precision="fp32", cuda_graphs=False), make_requests(4), OPTIONS
    )
    assert recorded._graphs is not None and recorded._graphs.has_graphs
    assert [response(sample) for sample in samples] == [response(sample) for sample in plain]
    for sample, other in zip(samples, plain, strict=True):
        torch.testing.assert_close(sample.engine_logprobs, other.engine_logprobs, atol=1e-4, rtol=0)
    assert [response(sample) for sample in generate(recorded, make_requests(4), OPTIONS)] == [
        response(sample) for sample in samples
    ]


@pytest.mark.parametrize("kind", ["atomic", "in_place"])
def test_weight_update_changes_samples_and_versions(directory, kind):
    engine = make_engine(directory, precision="fp32", update=kind)
    before = generate(engine, make_requests(), OPTIONS)
    update = engine.begin_update(1)
    for name, view in update.views(list(engine._weights.views)).items():
        view.copy_(engine._weights.views[name].flip(-1).clone())
        update.load([name])
    update.commit()
    after = generate(engine, make_requests(), OPTIONS)
    assert [response(sample) for sample in before] != [response(sample) for sample in after]
    assert all(sample.weight_versions.tolist() == [1] * 12 for sample in after)


@pytest.mark.promise("gpu-sleep-frees-memory")
@needs_cuda
def test_sleep_frees_90_percent_of_engine_memory(tmp_path):
    path = save_model(
        tmp_path,
        "llama",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        vocab_size=8192,
    )
    empty = torch.cuda.memory_allocated()
    engine = make_engine(path)
    before = generate(engine, make_requests(8), OPTIONS)
    held = torch.cuda.memory_allocated() - empty
    engine.sleep()
    engine.sleep()
    assert torch.cuda.memory_allocated() - empty < 0.1 * held
    engine.wake()
    load_directory(engine, path)
    assert [response(sample) for sample in generate(engine, make_requests(8), OPTIONS)] == [
        response(sample) for sample in before
    ]


@needs_cuda
def test_colocated_weight_sync_writes_in_place(tmp_path, one_rank):
    """There is no second copy: the weight sync allocates less than a tenth of the weights."""
    directory = save_model(
        tmp_path,
        "llama",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        vocab_size=8192,
    )
    shape = shape_of(directory)
    table = weight_table(shape)
    engine = make_engine(directory, precision="fp32", update="in_place")
    weights = {spec.name: torch.randn(spec.shape, device="cuda") for spec in table}
    places = {name: view.data_ptr() for name, view in engine._weights.views.items()}
    dist.init_process_group("cpu:gloo,cuda:nccl")
    try:
        plan = plan_resharding(shape, ParallelConfig(), engine.weight_format.layout)
        link = Link.from_default_group(
            plan.labels, timeout=timedelta(seconds=60), device=torch.device("cuda")
        )
        publisher = Publisher(
            plan,
            link,
            read=weights.__getitem__,
            begin_update=engine.begin_update,
            bucket_bytes=1 << 20,
            held_weights=engine,
            verify="sync",
        )
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        publisher.publish(1)
        assert torch.cuda.max_memory_allocated() - held < 0.1 * sum(
            tensor.nbytes for tensor in weights.values()
        )
        link.close()
    finally:
        dist.destroy_process_group()
    assert {name: view.data_ptr() for name, view in engine._weights.views.items()} == places
    assert all(torch.equal(engine._weights.views[name], tensor) for name, tensor in weights.items())
    assert engine.version == 1
