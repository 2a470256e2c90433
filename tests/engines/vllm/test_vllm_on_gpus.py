"""Environment and settings of vLLM's process for ranks on (mocked) GPUs."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aligner.engines.external import gpu_identity
from aligner.engines.external.replica import Replica
from aligner.engines.vllm import program_client, replica_nodes, vllm_engine
from aligner.errors import AlignerError
from aligner.schema import EngineConfig, EngineParallelConfig, VLLMConfig
from benchmarks.models import shape_of

SHAPE = shape_of("tiny")


class OtherRanks(Replica):
    """A replica whose ranks are all simulated by this process; rank r runs on GPU `first` + r."""

    first, hosts = 0, ("one",) * 4

    def run_on_all_ranks(self, description: str, action: Any) -> list[Any]:
        own_rank = self.rank
        answers = []
        for rank in range(self.size):
            self.rank = rank
            host = self.hosts[rank]
            gpu_identity.socket.gethostname = lambda host=host: host
            replica_nodes.get_node_name = lambda host=host: host
            if "GPU" in description:
                device = torch.device("cuda", self.first + rank)
                answers.append(gpu_identity._describe_gpu(device, rank))
            elif rank == own_rank or "starting" not in description:
                answers.append(action())
        self.rank = own_rank
        return answers


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Environments and settings of the started programs, which are fakes."""
    started: list[dict[str, Any]] = []

    class Program:
        def __init__(self, python: str, environment: dict[str, str]) -> None:
            started.append({"environment": environment})

        async def start(self, settings: dict[str, Any], *descriptions: Any) -> None:
            started[-1]["settings"] = settings

        async def wait_for_exit(self) -> str:
            await asyncio.Event().wait()
            return ""

        def terminate(self) -> None:
            pass

    monkeypatch.setattr(program_client, "Program", Program)
    monkeypatch.setattr(replica_nodes, "get_node_name", lambda: "one")
    monkeypatch.setattr(gpu_identity, "socket", SimpleNamespace(gethostname=lambda: "one"))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"{device}0")
    )
    return started


def start(monkeypatch: pytest.MonkeyPatch, rank: int, **settings: Any) -> vllm_engine.VLLMEngine:
    """Start the engine on the first rank of its replica; each rank has one GPU."""
    chosen = EngineConfig(
        kind="vllm", update="in_place", vllm=VLLMConfig(python=sys.executable), **settings
    )
    if chosen.parallel.replica_ranks > 1:
        monkeypatch.setattr("aligner.engines.external.external_engine.Replica", OtherRanks)
        monkeypatch.setattr(OtherRanks, "first", rank - rank % chosen.parallel.replica_ranks)
        monkeypatch.setattr(
            OtherRanks, "run_on_rank0", lambda replica, description, action: action()
        )
    return vllm_engine.VLLMEngine(
        Path("model"), SHAPE, chosen, rank, 7, object(), device=f"cuda:{rank}"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["0,1", "2,3"]),
        ("4,5,6,7", ["4,5", "6,7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_replica_workers_see_only_gpus_of_their_ranks(pretended, monkeypatch, visible, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    for rank in (0, 2):
        engine = start(monkeypatch, rank, parallel=EngineParallelConfig(tensor=2, data=2))
        assert engine._allocate_memory.args == (torch.device("cuda", rank),)
        engine._replica.client.shutdown()
    environments = [each["environment"] for each in pretended]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == seen
    assert [environment["VLLM_WORKER_MULTIPROC_METHOD"] for environment in environments] == [
        "spawn",
        "spawn",
    ]
    assert not [environment for environment in environments if "LOCAL_RANK" in environment]


def test_first_rank_of_each_node_starts_its_workers(pretended, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(OtherRanks, "hosts", ("one", "one", "other", "other"))
    layout = EngineParallelConfig(tensor=2, pipeline=2)
    engines = [start(monkeypatch, rank, parallel=layout) for rank in range(4)]
    assert [engine._replica.client is not None for engine in engines] == [True, False, False, False]
    headless = [engine._headless_workers is not None for engine in engines]
    assert headless == [False, False, True, False]
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in pretended] == ["0,1", "2,3"]
    for index, given in enumerate(pretended):
        assert given["environment"]["VLLM_HOST_IP"] == "127.0.0.1"
        expected = {"nnodes": 2, "node_rank": index, "master_addr": "127.0.0.1"}
        assert expected.items() <= given["settings"].items()
    for engine in engines:
        engine._stop_headless_workers()
    engines[0]._replica.client.shutdown()


@pytest.mark.parametrize("hosts", [("one", "one", "one", "two"), ("one", "two", "one", "two")])
def test_uneven_nodes_of_a_replica_are_refused(pretended, monkeypatch, hosts):
    monkeypatch.setattr(OtherRanks, "hosts", hosts)
    counts = ", ".join(f"{host} ({hosts.count(host)})" for host in ("one", "two"))
    message = re.escape(
        "engine.parallel: the 4 ranks of a replica must be adjacent, and the same number on each"
        f" node, got {counts}"
    )
    with pytest.raises(AlignerError, match=message):
        start(monkeypatch, 0, parallel=EngineParallelConfig(tensor=4))
    assert not pretended


def test_tensorrt_llm_refuses_a_replica_on_two_machines(pretended, monkeypatch):
    monkeypatch.setattr(OtherRanks, "hosts", ("one", "other"))
    replica = OtherRanks("TensorRT-LLM", 0, 2, None)
    with pytest.raises(
        AlignerError,
        match=r"engine\.parallel: all 2 ranks .* must run on one machine, got one, other",
    ):
        gpu_identity.gather_gpus(replica, torch.device("cuda", 0))


def test_each_stage_of_a_pipeline_has_the_gpu_of_its_rank(pretended, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    layout = EngineParallelConfig(tensor=2, pipeline=2, data=2)
    start(monkeypatch, 4, parallel=layout)._replica.client.shutdown()
    (given,) = pretended
    assert given["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert given["settings"]["pipeline_parallel_size"] == 2
    stage_layers = given["environment"]["VLLM_PP_LAYER_PARTITION"].split(",")
    assert sum(map(int, stage_layers)) == SHAPE.num_layers


@pytest.mark.parametrize("sleep", [True, False])
def test_vllm_on_gpu_uses_cuda_graphs_and_memory_share(pretended, monkeypatch, sleep):
    start(monkeypatch, 0, sleep=sleep)._replica.client.shutdown()
    wanted = {
        "enforce_eager": False,
        "enable_sleep_mode": sleep,
        "gpu_memory_utilization": 0.4,
        "dtype": "bfloat16",
    }
    settings = pretended[0]["settings"]
    assert {
        name: settings[name] for name in wanted
    } == wanted and "kv_cache_memory_bytes" not in settings


def test_vllm_on_cpu_gets_kv_cache_size_and_no_gpu(pretended, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = EngineConfig(
        kind="vllm", update="in_place", sleep=True, vllm=VLLMConfig(python=sys.executable)
    )
    engine = vllm_engine.VLLMEngine(Path("model"), SHAPE, chosen, 0, seed=7)
    engine._replica.client.shutdown()
    (given,) = pretended
    assert given["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert given["settings"]["kv_cache_memory_bytes"] and given["settings"]["enforce_eager"]
    assert (
        "gpu_memory_utilization" not in given["settings"]
        and not given["settings"]["enable_sleep_mode"]
    )
