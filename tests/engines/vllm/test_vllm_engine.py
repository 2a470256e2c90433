"""The installed vLLM: log-probs of a mixture of experts, sampling distribution, and cleanup after
kills."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from aligner.data.types import Prompt, Sample, collate
from aligner.engines.engine_loop import SingleResponses, run_steps
from aligner.engines.engine_protocol import (
    GenerationEngine,
    GenerationRequest,
    SamplingOptions,
)
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.errors import AlignerError, EngineExited
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import group_by_stored_tensor, weight_table
from aligner.schema import EngineParallelConfig
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED
from tests.megatron import families, jobs

pytestmark = [*NEEDED, pytest.mark.timeout(600)]
DRAWS = 10_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.save_tiny(tmp_path_factory.mktemp("model"), seed=0, layers=64, head_dim=32)


@pytest.fixture
def engine(directory: Path) -> Iterator[VLLMEngine]:
    """An engine that is not shared, so that a test may kill it."""
    settings = dataclasses.replace(engines.SETTINGS, kind="vllm", kv_cache_mib=64)
    engine = VLLMEngine(directory, engines.shape_of(directory), settings, 0, seed=7)
    engines.publish(engine, directory, 0)
    yield engine
    engine.shutdown()


def scored(directory: str, samples: list[Sample], tensor: int) -> torch.Tensor:
    """Return Megatron's log-probs of the samples."""
    batch = collate(samples, pad_token_id=0)
    return jobs.policy(directory, {"tensor": tensor, "sequence": tensor > 1}).logprobs(
        batch.tokens, batch.lengths
    )


def assert_refused(
    engine: VLLMEngine,
    message: str,
    value: float = 0.5,
    change: Callable[[ModelShape], ModelShape] = lambda shape: shape,
) -> None:
    """Check that an update with another model's parameters, or with NaN weights, raises."""
    table = engine._weight_table
    engine._weight_table = weight_table(change(engine._shape))
    update = engine.begin_update(7)
    try:
        with pytest.raises(AlignerError, match=message):
            for name in group_by_stored_tensor(engine._weight_table):
                update.views([name])[name].fill_(value)
                update.load([name])
            update.commit()
    finally:
        update.abort()
        engine._weight_table = table
    assert engine.version is None


def generate_then_kill_workers(directories: list[Path]) -> list[list[Sample]]:
    """Generate on both ranks of a replica with the weights of each directory; then kill its
    workers."""
    group = dist.new_group(timeout=timedelta(seconds=400))  # rank 1 waits until vLLM has started
    parallel = EngineParallelConfig(tensor=2, data=1)
    settings = dataclasses.replace(
        engines.SETTINGS, kind="vllm", kv_cache_mib=64, parallel=parallel
    )
    shape, is_first = engines.shape_of(directories[0]), dist.get_rank() == 0
    engine = VLLMEngine(directories[0], shape, settings, dist.get_rank(), 7, group)
    found = []
    try:
        shared = _shared_memory(_leader(engine)) if is_first else []
        for version, directory in enumerate(directories):
            message = (
                r"vLLM's model received no weights for model\.layers\.3\.input_layernorm\.weight, "
            )
            assert_refused(engine, message, change=lambda shape: shape.with_layers(3))
            assert_refused(
                engine,
                r"vLLM's model has no parameter for model\.layers\.0\.self_attn\.q_proj\.bias",
                change=lambda shape: dataclasses.replace(shape, qkv_bias=True),
            )
            assert_refused(engine, r"NaN weights in .*model\.norm\.weight", torch.nan)
            engines.publish(engine, directory, version)
            wanted = [
                GenerationRequest(Prompt(at, "", torch.arange(2, 5 + at)), 0) for at in range(6)
            ]
            found.append(
                engines.generate(engine, wanted, SamplingOptions(14, temperature=jobs.TEMPERATURE))
            )
        # SIGKILL leaves no time for cleanup, and vLLM may not have noticed the dead workers yet.
        if is_first:
            workers = [
                process
                for process in _group(_leader(engine))
                if "Worker" in "".join(process.cmdline())
            ]
            assert len(workers) == 2
            for worker in workers:
                worker.kill()
        with pytest.raises(EngineExited if is_first else AlignerError, match="vLLM: "):
            engines.publish(engine, directories[0], len(directories))
    finally:
        engine.shutdown()
    if is_first:
        _assert_gone(_leader(engine), shared)
    return found


@pytest.mark.promise("vllm-logprobs-equal-megatron")
def test_logprobs_equal_megatron_after_refused_updates(pool, tmp_path):
    """Tests Qwen3's mixture of experts; `tests/system/test_vllm_run.py` tests a Llama."""
    directories = [families.save("qwen3_moe", tmp_path / "first"), tmp_path / "second"]
    model = engines.reference_model(directories[0])
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(-1).contiguous()
    model.save_pretrained(directories[1])
    versions, _ = pool.run(generate_then_kill_workers, 2, directories, timeout=500)
    for directory, samples in zip(directories, versions, strict=True):
        batch = collate(samples, pad_token_id=0)
        for tensor in (1, 2):
            for found in pool.run(scored, tensor, str(directory), samples, tensor):
                assert (
                    float(torch.where(batch.mask, found - batch.engine_logprobs, 0.0).abs().max())
                    < 1e-4
                )


@pytest.mark.promise("vllm-logprobs-equal-megatron")
def test_vllm_samples_follow_exact_distribution(tmp_path):
    directory = engines.save_tiny(tmp_path, seed=0, head_dim=32, tied=True)
    (prompt,) = engines.prompts(1)
    model, temperature = engines.reference_model(directory), 1.5
    with torch.no_grad():
        expected = (model(prompt.tokens[None]).logits[0, -1] / temperature).softmax(-1) * DRAWS
    with engines.engine_of("vllm", directory) as engine:
        engines.publish(engine, directory, 0)
        wanted = [GenerationRequest(prompt, index) for index in range(DRAWS)]
        samples = engines.generate(engine, wanted, SamplingOptions(1, temperature=temperature))
    counts = torch.bincount(
        torch.tensor([engines.response(sample)[0] for sample in samples]),
        minlength=engines.VOCABULARY,
    )
    common = expected >= 5
    found = torch.cat((counts[common], counts[~common].sum()[None])).double()
    expected_counts = torch.cat((expected[common], expected[~common].sum()[None])).double()
    freedom = len(found) - 1
    chi_square = float(((found - expected_counts) ** 2 / expected_counts.clamp(min=1e-9)).sum())
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, "four standard deviations"


def _group(leader: int) -> list[psutil.Process]:
    """Return the live processes of the program's process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _shared_memory(leader: int) -> list[Path]:
    """Return the files in /dev/shm that the processes of a group have mapped."""
    mapped = {region.path for process in _group(leader) for region in process.memory_maps()}
    found = [
        path for path in map(Path, mapped) if path.is_relative_to("/dev/shm") and path.exists()
    ]
    assert found, "it is known where they have it"
    return found


def _assert_gone(leader: int, shared: list[Path], within_s: float = 40.0) -> None:
    end = time.monotonic() + within_s
    while _group(leader) and time.monotonic() < end:
        time.sleep(0.2)
    assert _group(leader) == []
    assert [path for path in shared if path.exists()] == []


def _leader(engine: GenerationEngine) -> int:
    return engine._replica.client._program.process.pid  # type: ignore[attr-defined]


@pytest.mark.promise("killed-vllm-is-replaced")
def test_killed_vllm_is_reported_and_cleaned_up(directory, engine):
    """`tests/system/test_vllm_run.py` kills a worker of vLLM."""
    leader = _leader(engine)
    shared = _shared_memory(leader)
    generation = SingleResponses(engine).start(engines.requests(), SamplingOptions(30))
    os.kill(leader, signal.SIGKILL)
    with pytest.raises(EngineExited, match="vLLM: its process was killed by SIGKILL"):
        run_steps(generation)
    engine.shutdown()
    _assert_gone(leader, shared)


def test_update_raises_engine_gone_if_worker_parent_is_dead(directory, engine):
    """`test_logprobs_equal_megatron_after_refused_updates` covers an update after the workers are
    killed."""
    leader = _leader(engine)
    shared = _shared_memory(leader)
    worker = max(
        psutil.Process(leader).children(recursive=True), key=lambda each: each.memory_info().rss
    )
    parent = worker.parent()
    assert parent.pid != leader
    parent.kill()
    with pytest.raises(EngineExited, match="vLLM: "):
        engines.publish(engine, directory, 1)
    engine.shutdown()
    _assert_gone(leader, shared)


_DRIVER = """
import dataclasses, sys, time
from pathlib import Path
from tests.engines.vllm.test_vllm_engine import VLLMEngine, _leader, engines
directory = Path(sys.argv[1])
settings = dataclasses.replace(engines.SETTINGS, kind="vllm", kv_cache_mib=64)
engine = VLLMEngine(directory, engines.shape_of(directory), settings, 0, seed=7)
engines.publish(engine, directory, 0)
print(_leader(engine), flush=True)
time.sleep(600)
"""


def test_vllm_exits_when_its_rank_is_killed(directory):
    command = [sys.executable, "-c", _DRIVER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        leader = int(driver.stdout.readline())
        shared = _shared_memory(leader)
        driver.send_signal(signal.SIGKILL)
    _assert_gone(leader, shared)
