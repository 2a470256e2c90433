"""The installed vLLM with pipeline parallelism: log-probs, weight syncs, and damaged weights of a
stage."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from aligner.data.types import Prompt, Sample, collate
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.engines.vllm import program_client, replica_nodes
from aligner.engines.vllm.vllm_engine import VLLMEngine
from aligner.engines.weight_probe import ProbeTolerance, build_probe, find_probe_problem, run_probe
from aligner.errors import AlignerError
from aligner.schema import EngineParallelConfig
from tests.engines import engines
from tests.engines.vllm.shared_clients import NEEDED
from tests.megatron import families, jobs
from tests.rounds import rare

pytestmark = [*NEEDED, pytest.mark.timeout(900)]
HEADS: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
WORKER_CODE = '''

from vllm.model_executor.model_loader.reload import layerwise

_restore = layerwise._copy_and_restore_kernel_tensors


def _set_fault(self, worker, fault, target):
    """Set the fault of a worker in the next updates, or flip a bit of a parameter at once."""
    layerwise._copy_and_restore_kernel_tensors = _restore
    if get_world_group().rank_in_group != worker:
        return
    model = self.weight_transfer_engine.model
    if fault == "flip":
        dict(model.named_parameters())[target].data.view(torch.int32).view(-1)[-1] ^= 1
    elif fault == "corrupt":
        damaged = model.get_submodule(target)

        def restore_corrupted(layer, info):
            _restore(layer, info)
            if layer is damaged:
                layer.weight.data[-1] += 1e-3

        layerwise._copy_and_restore_kernel_tensors = restore_corrupted


def _count_parameters(self):
    return sum(each.numel() for each in self.weight_transfer_engine.model.parameters())


AlignerWorker.set_fault = _set_fault
AlignerWorker.count_parameters = _count_parameters
'''
SERVER_CODE = """
async def _set_fault(self, **arguments):
    await self._call_workers("set_fault", **arguments)


async def _count_parameters(self):
    return await self._call_workers("count_parameters")


Server._set_fault = _set_fault
Server._count_parameters = _count_parameters


if __name__ == "__main__":"""


def use_faulty_program(directory: Path) -> None:
    """Let this process start a copy of the program whose workers can have faults."""
    program = directory / "program"
    if dist.get_rank() == 0:
        shutil.copytree(program_client._PROGRAM, program)
        receive = program / "receive.py"
        receive.write_text(receive.read_text() + WORKER_CODE)
        serve = program / "serve.py"
        serve.write_text(serve.read_text().replace('if __name__ == "__main__":', SERVER_CODE))
    program_client._PROGRAM = program
    program_client._ORDER_DESCRIPTIONS |= {"set_fault": "set a fault", "count_parameters": "count"}


def execute(engine: VLLMEngine, name: str, **arguments: Any) -> Any:
    """Execute an order in vLLM's process, and return its result on every rank. Collective."""

    def run(client: Any) -> Any:
        return client._loop.run(name, client._program.execute(name, **arguments), 60)

    return engine._replica.run_on_client(name, run)


def sync(engine: VLLMEngine, directory: Path, version: int) -> list[str]:
    """Sync the weights, and return the wrong ones. Collective."""
    engines.publish(engine, directory, version)
    return list(engine.find_wrong_weights({}))


def assert_damage_is_found(engine: VLLMEngine, directory: Path) -> None:
    """Check that each damaged or missing weight of stage 1 is named with the stage's worker."""
    norm = "model.layers.3.post_attention_layernorm"
    execute(engine, "set_fault", worker=1, fault="corrupt", target=norm)
    assert sync(engine, directory, 2) == [f"{norm}.weight (in {norm}.weight) on worker 1"]

    execute(engine, "set_fault", worker=1, fault="none", target="")
    assert sync(engine, directory, 3) == []
    name = "model.layers.2.input_layernorm.weight"
    execute(engine, "set_fault", worker=1, fault="flip", target=name)
    assert list(engine.find_changed_weights()) == [f"{name} on worker 1"]

    # Both workers get the slices of one stage. The first one may also have the embedding.
    rank = engine._rank
    for stage, first_weights in ((0, r"(embed_tokens|layers\.0)"), (1, r"layers\.2")):
        engine._rank = stage
        message = rf"no parameter for model\.{first_weights}\.\S* \(worker {1 - stage}\)"
        assert_refused(engine, f"vLLM's model has {message}")
    engine._rank = rank
    table = engine._weight_table
    engine._weight_table = tuple(spec for spec in table if spec.name != name)
    message = re.escape(f"vLLM's model received no weights for {name} (worker 1)")
    assert_refused(engine, message)
    engine._weight_table = table


def assert_refused(engine: VLLMEngine, message: str) -> None:
    """Check that a weight sync fails with an error. Collective."""
    update = engine.begin_update(9)
    try:
        with pytest.raises(AlignerError, match=message):
            for spec in engine._weight_table:
                views = update.views([spec.name])
                for view in views.values():
                    view.fill_(0.5)
                update.load(list(views))
            update.commit()
    finally:
        update.abort()
    assert engine.version is None


def generate(
    directories: list[Path], layout: EngineParallelConfig, scratch: Path, nodes: int
) -> tuple[list[list[Sample]], list[int]]:
    """Generate with the weights of each directory, which are synced one after the other; then damage
    the weights of two stages, and kill a worker. Collective over a replica.

    Args:
        directories: Directories of a model with different weights.
        layout: Layout of the replica.
        scratch: Directory for a copy of the program.
        nodes: Number of nodes that the ranks of this machine take themselves for.

    Returns:
        The samples of each version on the first rank, and the number of parameters of each worker.
    """
    group = dist.new_group(timeout=timedelta(seconds=600))
    use_faulty_program(scratch)
    replica_nodes.get_node_name = lambda: f"node {dist.get_rank() * nodes // layout.ranks}"
    settings = dataclasses.replace(engines.SETTINGS, kind="vllm", kv_cache_mib=64, parallel=layout)
    shape = engines.shape_of(directories[0])
    engine = VLLMEngine(directories[0], shape, settings, dist.get_rank(), 7, group)
    requests = [GenerationRequest(Prompt(at, "", torch.arange(2, 5 + at)), 0) for at in range(6)]
    options = SamplingOptions(14, temperature=jobs.TEMPERATURE)
    found = []
    try:
        for version, directory in enumerate(directories):
            assert list(engine.find_changed_weights()) == []
            assert sync(engine, directory, version) == []
            found.append(engines.generate(engine, requests, options))
            assert_probe_equals_transformers(engine, directory)
        counts = execute(engine, "count_parameters")
        if layout.pipeline == 2 and layout.tensor == 1:
            assert_damage_is_found(engine, directories[-1])
        if engine._headless_workers is not None:
            assert_exit_with_workers(engine._headless_workers)
        return found, counts
    finally:
        engine.shutdown()


def assert_exit_with_workers(workers: program_client.HeadlessWorkers) -> None:
    """Check that a rank exits if a worker on its node is killed."""
    codes: list[int] = []
    os._exit = codes.append
    program = psutil.Process(workers._program.process.pid)
    max(program.children(recursive=True), key=lambda each: each.memory_info().rss).kill()
    end = time.monotonic() + 60
    while not codes and time.monotonic() < end:
        time.sleep(0.2)
    assert codes == [1]


def assert_probe_equals_transformers(engine: GenerationEngine, directory: Path) -> None:
    sequences = build_probe(engines.shape_of(directory), 48, seed=3)
    result = run_probe(engine, sequences)
    model = families.load_reference(directory)
    with torch.no_grad():
        logprobs = model(sequences).logits[:, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, sequences[:, 1:, None])[..., 0]
    assert find_probe_problem(result, expected, ProbeTolerance(1e-4, False)) is None


def scored(directory: str, samples: list[Sample]) -> torch.Tensor:
    """Return Megatron's log-probs of the samples."""
    batch = collate(samples, pad_token_id=0)
    return jobs.policy(directory, {}).logprobs(batch.tokens, batch.lengths)


@pytest.mark.promise("vllm-logprobs-equal-megatron", "weight-sync-is-verified")
@pytest.mark.parametrize(
    ("family", "layout", "nodes"),
    [
        # The last stage has the head, which is tied to the embedding of the first stage.
        ("llama2", EngineParallelConfig(pipeline=2), 1),
        # Each stage has the embedding and the head.
        ("qwen3_moe", EngineParallelConfig(pipeline=2), 2),
        rare("qwen3_moe", EngineParallelConfig(tensor=2, pipeline=2, expert=2), 1),
        rare("glm4_moe", EngineParallelConfig(pipeline=2), 1),
        rare("llama2", EngineParallelConfig(tensor=2), 2),
    ],
)
def test_pipeline_stages_hold_and_compute_the_weights_of_each_sync(
    pool, tmp_path, family, layout, nodes
):
    changes = {"tie_word_embeddings": True} if family == "llama2" else {}
    directories = [families.save(family, tmp_path / "first", **HEADS, **changes)]
    model = engines.reference_model(directories[0])
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(-1).contiguous()
    directories.append(tmp_path / "second")
    model.save_pretrained(directories[1])

    results = pool.run(generate, layout.ranks, directories, layout, tmp_path, nodes, timeout=800)
    versions, counts = results[0]
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert all(0 < count < whole for count in counts)
    for directory, samples in zip(directories, versions, strict=True):
        batch = collate(samples, pad_token_id=0)
        (found,) = pool.run(scored, 1, str(directory), samples)
        errors = torch.where(batch.mask, found - batch.engine_logprobs, 0.0).abs()
        assert float(errors.max()) < 1e-4
