"""A rank survives paused, killed and restarted Triton processes, and loses no update."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from aligner.errors import AlignerError
from aligner.schema import PortsConfig
from aligner.servers.critic_client import CriticClient, RunId, UpdateJournal
from aligner.servers.restart_budget import RestartBudget
from aligner.servers.triton_host import TritonHost, _build_triton_arguments, _write_model
from tests.servers.roles import RunningRole
from tests.servers.test_recovery import Expected, check_updates

_STUB = "triton_python_backend_stub"


class PyTritonModel:
    """A PyTriton model whose `model.py` has the given content."""

    model_name, model_version = "critic_infer", 1

    def __init__(self, source: str) -> None:
        self._source = source

    def generate_model(self, repository: Path) -> None:
        files = repository / self.model_name / str(self.model_version)
        files.mkdir(parents=True)
        (files / "model.py").write_text(self._source)


def test_restart_budget_counts_the_last_hour_only():
    now = [100.0]
    budget = RestartBudget(2, lambda: now[0])
    budget.record()
    now[0] += 1800
    budget.record()
    assert budget.is_spent and budget.describe() == "2 of 2 in the last hour"
    now[0] += 1801
    assert not budget.is_spent and budget.used == 1
    assert RestartBudget(0).is_spent


def test_each_stub_start_uses_different_request_numbers(monkeypatch, tmp_path):
    """PyTriton numbers the requests of each stub from 1. With equal numbers, the next stub's first
    request would receive a late answer to the previous stub's request."""
    pytriton = (
        "class BatchResponsesHandler: ...\n"
        "class TritonPythonModel:\n    def initialize(self, args):\n        self._id_counter = 0"
    )
    _write_model(PyTritonModel(pytriton), tmp_path)
    files = tmp_path / "critic_infer" / "1"
    assert (files / "pytriton_model.py").read_text() == pytriton

    # Triton imports a version's directory as a package, too.
    package = ModuleType("stub_of_triton")
    package.__path__ = [str(files)]
    for name in ("stub_of_triton", "triton_python_backend_utils"):
        monkeypatch.setitem(sys.modules, name, package)
    stub = importlib.import_module("stub_of_triton.model")

    starts = set()
    for _ in range(8):
        model = stub.TritonPythonModel()
        model.initialize({})
        starts.add(model._id_counter)
    assert len(starts) == 8


def test_each_endpoint_has_one_helper_process(critic: RunningRole):
    """The number does not depend on the number of concurrent requests: each helper process takes a
    third of a CPU second to start."""
    processes = psutil.Process(critic.ranks[0].pid).children(recursive=True)
    helpers = [each for each in processes if each.cmdline() and _STUB in each.cmdline()[0]]
    models = sorted(each.cmdline()[1].split("/")[-3] for each in helpers)
    assert models == ["control", "critic_infer", "critic_save", "critic_train"]


def test_triton_arguments_keep_spaces_in_paths():
    class ServerConfig:
        def server_args(self) -> dict[str, object]:
            return {"log-file": "/a run/x.log", "backend-config": ["a,b=c", "d"], "load-model": "*"}

    assert _build_triton_arguments(ServerConfig()) == [
        "--disable-auto-complete-config",
        "--pinned-memory-pool-byte-size=0",
        "--log-file=/a run/x.log",
        "--backend-config=a,b=c",
        "--backend-config=d",
    ]


def test_request_queued_before_triton_restart_is_cancelled():
    """The caller repeats the cancelled request with the new Triton."""
    served: list[int] = []
    begun, finish = threading.Event(), threading.Event()

    def serve(tensors):
        served.append(tensors["number"])
        begun.set()
        finish.wait(30)
        return tensors

    async def restart_triton() -> None:
        answer = host._create_infer_function(serve, concurrent=1)
        requests = [asyncio.create_task(answer([{"number": number}])) for number in (1, 2)]
        await asyncio.to_thread(begun.wait, 30)

        host._cancel_waiting_requests()
        finish.set()
        await asyncio.wait(requests, timeout=30)
        assert [request.cancelled() for request in requests] == [False, True]

    host = TritonHost("127.0.0.1", PortsConfig(), 16)
    asyncio.run(restart_triton())
    assert served == [1]


def test_too_many_triton_restarts_end_the_server():
    host = TritonHost("127.0.0.1", PortsConfig(), 16)
    host._restarts = RestartBudget(0)
    host._triton = type("Ended", (), {"is_alive": lambda self: False})()
    host._watch()
    with pytest.raises(AlignerError, match="more than 0 of 0 in the last hour"):
        host.check()


@pytest.mark.promise("lost-triton-costs-no-update")
@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["paused stubs", "killed stub", "killed triton", "killed gateway"]
)
def test_lost_triton_costs_no_rank_and_no_update(tmp_path: Path, fault: str) -> None:
    role = RunningRole("critic", tmp_path).wait_ready()
    rank = psutil.Process(role.ranks[0].pid)
    try:
        client = CriticClient(
            role.endpoint, role.access, 90, RunId("run"), UpdateJournal(tmp_path / "journal"), 256
        )
        client.start()
        expected = Expected()
        check_updates(client, expected, range(3))
        _disturb(rank, fault)
        check_updates(client, expected, range(3, 9))
        assert client._replicas[0].control(10, "version")["version"] == 9
        client.close()
        log = role.log.read_text()
        assert "restarting Triton (1 of 60 in the last hour)" in log, log
        assert rank.is_running()
    finally:
        code = role.stop()
    assert code == 0


def _disturb(rank: psutil.Process, fault: str) -> None:
    started = rank.children(recursive=True)
    if fault == "killed gateway":
        next(each for each in started if "aligner.servers.gateway" in each.cmdline()).kill()
        return
    if fault == "killed triton":
        next(each for each in started if each.name() == "tritonserver").kill()
        return
    stubs = [each for each in started if each.cmdline()[:1] and _STUB in each.cmdline()[0]]
    if fault == "killed stub":
        # If another model's stub were killed, the updates would finish before Triton is restarted.
        next(stub for stub in stubs if "/critic_train/" in stub.cmdline()[1]).kill()
        return
    for stub in stubs:
        stub.suspend()
    threading.Timer(1.5, _resume, [stubs]).start()


def _resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():
            process.resume()
