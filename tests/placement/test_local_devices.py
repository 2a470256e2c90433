"""Assignment of GPUs to roles on a simulated machine with eight GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.errors import ConfigError
from aligner.launcher.local import LocalRanks
from aligner.launcher.rank_environment import FreePorts
from aligner.placement import roles
from aligner.placement.local_devices import assign_local_devices, describe_devices, parse_numbers
from aligner.placement.placement_table import build_placements
from aligner.schema import Config

WIDE = ("actor.parallel.data=2", "engine.parallel.data=2", "critic.parallel.tensor=2")
SERVED = (
    "engine.placement=server",
    "rollout.max_staleness=1",
    "algorithm.truncated_importance=token",
)
REWARD_MODEL = ("reward.kind=model", "reward.path=models/absent", "reward.replicas=2")


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def make_config(*overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", *overrides])


def test_roles_get_disjoint_devices() -> None:
    assert assign_local_devices(make_config(*WIDE)) == {"trainer": (0, 1), "critic": (2, 3)}
    found = assign_local_devices(make_config(*WIDE, *SERVED, *REWARD_MODEL))
    assert list(found) == ["trainer", "generator", "critic", "reward", "reward.1"]
    assert [device for devices in found.values() for device in devices] == [*range(8)]


def test_explicit_devices_are_reserved() -> None:
    config = make_config(*WIDE, "cluster.devices.critic='0,5'")
    assert assign_local_devices(config) == {"trainer": (1, 2), "critic": (0, 5)}
    assert {place.role: place.device for place in build_placements(config)} == {
        "trainer": "cuda 1-2",
        "critic": "cuda 0,5",
        "reward": "cpu",
    }


def test_roles_may_list_the_same_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_GPUS", "1")
    with pytest.raises(
        ConfigError,
        match=(
            r"\(ranks: trainer 1, critic 1\), but only 1 of the 1 GPUs of this machine are free"
        ),
    ):
        check(make_config())
    config = make_config("cluster.devices.trainer=0", "cluster.devices.critic=0")
    check(config)
    assert assign_local_devices(config) == {"trainer": (0,), "critic": (0,)}


def test_replicas_split_or_share_listed_devices() -> None:
    parts = assign_local_devices(make_config(*REWARD_MODEL, "cluster.devices.reward=6-7"))
    assert (parts["reward"], parts["reward.1"]) == ((6,), (7,))
    shared = assign_local_devices(make_config(*REWARD_MODEL, "cluster.devices.reward=7"))
    assert shared["reward"] == shared["reward.1"] == (7,)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (
            ["cluster.devices.critic=8"],
            "cluster.devices.critic=8: must list different devices from 0 to 7",
        ),
        (
            ["cluster.devices.critic='1,1'"],
            "cluster.devices.critic=1,1: must list different devices",
        ),
        (
            ["cluster.devices.critic=all"],
            "cluster.devices.critic=all: must be a list of numbers and ranges",
        ),
        (
            [*WIDE, "cluster.devices.critic=3"],
            "cluster.devices.critic=3: must list 2 devices (one per rank)",
        ),
        (
            [*SERVED, "cluster.devices.trainer=1", "cluster.devices.generator=1"],
            "device 1 also belongs to the trainer, but NCCL",
        ),
        (
            ["actor.parallel.data=8", "engine.parallel.data=8"],
            "(ranks: trainer 8, critic 1), but only 8 of the 8 GPUs of this machine are free",
        ),
    ],
)
def test_invalid_device_assignment_is_refused(overrides: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(make_config(*overrides))
    assert error in str(caught.value)


def test_ranks_see_only_devices_of_their_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes print their visible devices and local rank."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    config = make_config(*WIDE, f"run.dir={tmp_path}", "cluster.devices.critic=1-2")
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'])"
    (tmp_path / "logs").mkdir()
    ranks = LocalRanks(lambda role, file: (sys.executable, "-c", program), config, FreePorts())
    try:
        for role in ("trainer", "critic", "reward"):
            for rank in ranks.start(role):
                rank.process.wait(30)
    finally:
        ranks.close()
    seen = {file.stem: file.read_text().split() for file in (tmp_path / "logs").iterdir()}
    assert seen["trainer-0"] == ["GPU-a,GPU-d", "0"] and seen["trainer-1"] == ["GPU-a,GPU-d", "1"]
    assert seen["critic-0"] == ["GPU-b,GPU-c", "0"] and seen["critic-1"] == ["GPU-b,GPU-c", "1"]
    assert seen["reward-0"] == [
        os.environ["CUDA_VISIBLE_DEVICES"],
        "0",
    ], "a function of the user's may use any"


def test_gpu_count_prefers_driver_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALIGNER_GPUS")
    monkeypatch.setattr(roles, "Path", lambda path: tmp_path / Path(path).relative_to("/"))
    assert roles.count_gpus() == 0
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert roles.count_gpus() == 2, "a sandbox may show no files of the driver's"
    for name in "abc":
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert roles.count_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert roles.count_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert roles.count_gpus() == 0


def test_device_list_survives_round_trip() -> None:
    for devices in ((0,), (0, 1, 2), (0, 2, 3, 7), (5, 6)):
        assert tuple(parse_numbers(describe_devices(devices))) == devices


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 1),
        (("cluster.threads_per_rank=3",), 3),
        (("actor.optimizer.offload_fraction=0.5", "actor.optimizer.distributed=true"), None),
        (("critic.optimizer.offload_fraction=1", "critic.optimizer.distributed=true"), None),
    ],
)
def test_gpu_rank_has_one_thread_without_offload(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expected: int | None
) -> None:
    assert roles.get_configured_threads(make_config(*overrides)) == expected
    monkeypatch.setenv("ALIGNER_GPUS", "0")
    assert roles.get_configured_threads(make_config(*overrides)) == (3 if expected == 3 else None)
