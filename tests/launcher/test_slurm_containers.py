"""Tests of `srun --container`: the bundles that aligner writes, and a job of a real Slurm.

The image of the job is busybox, with a program `aligner` that prints how it was started.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aligner.checks.cluster import find_problems
from aligner.config.compose import compose_config
from aligner.config.prerequisites import plan_run
from aligner.errors import ConfigError
from aligner.launcher.job_submission import render_preview
from aligner.launcher.rank_environment import FreePorts
from aligner.launcher.slurm.containers import list_bundle_shell_lines, send_to_bundle_step
from aligner.launcher.slurm.job_steps import Allocation, Nodes, SlurmSteps
from aligner.launcher.slurm.slurm_commands import has_container_tasks
from aligner.launcher.slurm.submit import SlurmJobs
from aligner.models.model_source import NOTHING_EXPECTED
from aligner.placement.job_layout import compute_job_layout
from aligner.placement.oci_bundle import build_bundle_config
from benchmarks.runs import REPOSITORY
from tests.launcher.stand_ins import stand_in
from tests.slurm_cluster import BUSYBOX, SlurmCluster, why_no_containers

# Prints its arguments, environment and mounts, and fails as a server, which ends the run.
_PROGRAM = """#!/bin/sh
echo "arguments: $*"
echo "directory: $(pwd)"
echo "user: $(id -u)"
env | sed 's/^/variable: /'
sed 's/^/mount: /' /proc/mounts
echo "written: $(touch new_file && echo yes)"
echo "root: $(touch /etc/new_file 2>&1)"
[ "$1" = prepare ] || exit 3
"""
# Prints the numbers of the signals that it receives.
_RANK = """
import signal, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print(number, flush=True))
print("ready", flush=True)
time.sleep(120)
"""


def write_bundle(bundle: Path, **process: Any) -> Path:
    """Write a bundle like `umoci unpack --rootless`, whose program `aligner` is `_PROGRAM`."""
    root = bundle / "rootfs"
    for name in ("bin", "dev", "etc", "opt/image", "proc", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    program = root / "opt" / "image" / "aligner"
    program.write_text(_PROGRAM)
    program.chmod(0o755)
    config = {
        "ociVersion": "1.0.2",
        "hostname": "umoci-default",
        "root": {"path": "rootfs", "readonly": True},
        "process": {
            "terminal": True,
            "user": {"uid": 10001, "gid": 10001},
            "args": ["aligner", "--help"],
            "cwd": "/",
            "env": [
                "PATH=/opt/image:/bin",
                "HOME=/home/of image",
                "OMP_NUM_THREADS=64",
                "KIND=image",
            ],
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            **process,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
            },
            {
                "destination": "/dev/shm",
                "type": "tmpfs",
                "source": "shm",
                "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"],
            },
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue"},
        ],
        "linux": {
            "namespaces": [
                {"type": name} for name in ("pid", "network", "ipc", "uts", "mount", "user")
            ],
            "uidMappings": [{"containerID": 0, "hostID": os.getuid(), "size": 1}],
            "gidMappings": [{"containerID": 0, "hostID": os.getgid(), "size": 1}],
            "readonlyPaths": ["/proc/sys"],
        },
    }
    (bundle / "config.json").write_text(json.dumps(config))
    return bundle


def config(tmp_path: Path, *overrides: str, image: str | None = None):
    return compose_config(
        [
            "experiment=tiny_ppo",
            "cluster=slurm",
            f"run.dir={tmp_path}/run",
            "cluster.slurm.container_runtime=oci",
            f"cluster.slurm.image={image or tmp_path / 'bundle'}",
            *overrides,
        ]
    )


def test_role_bundle_adds_mounts_and_shares_node_namespaces(tmp_path: Path) -> None:
    image = write_bundle(tmp_path / "bundle")
    made = build_bundle_config(
        image, ["/data:/inside:ro"], {"OMP_NUM_THREADS"}, does_slurm_set_root=False
    )
    assert made["root"] == {"path": f"{image}/rootfs", "readonly": True}
    assert made["linux"]["namespaces"] == [{"type": "mount"}, {"type": "user"}]
    assert made["process"]["env"] == ["PATH=/opt/image:/bin", "HOME=/home/of image", "KIND=image"]
    assert made["process"]["user"] == {"uid": 0, "gid": 0}
    assert "rlimits" not in made["process"] and "hostname" not in made
    destinations = [mount["destination"] for mount in made["mounts"]]
    assert destinations.index("/dev") < destinations.index("/dev/shm")
    assert "/dev/mqueue" not in destinations and len({*destinations}) == len(destinations)
    sources = {mount["destination"]: mount for mount in made["mounts"]}
    assert sources["/dev/shm"]["source"] == "/dev/shm"
    assert sources["/inside"] == {
        "destination": "/inside",
        "source": "/data",
        "type": "none",
        "options": ["rbind", "rprivate", "ro"],
    }


def test_root_is_mounted_where_slurm_sets_its_path(tmp_path: Path) -> None:
    image = write_bundle(tmp_path / "bundle")
    made = build_bundle_config(image, [], (), does_slurm_set_root=True)
    assert made["root"]["path"] == "rootfs"
    assert (made["mounts"][0]["source"], made["mounts"][0]["destination"]) == (
        f"{image}/rootfs",
        "/",
    )


def add_busybox(image: Path) -> None:
    """Add the programs that `_PROGRAM` calls."""
    programs = image / "rootfs" / "bin"
    shutil.copy(BUSYBOX, programs / "busybox")
    for name in ("sh", "env", "sed", "id", "touch"):
        (programs / name).symlink_to("busybox")


@pytest.mark.skipif(why_no_containers() is not None, reason=str(why_no_containers()))
@pytest.mark.parametrize("does_slurm_set_root", [False, True])
def test_runc_starts_role_bundle(tmp_path: Path, does_slurm_set_root: bool) -> None:
    image = write_bundle(tmp_path / "bundle", terminal=False)
    add_busybox(image)
    role_bundle = tmp_path / "role"
    (role_bundle / "rootfs").mkdir(parents=True)
    made = build_bundle_config(
        image, [f"{tmp_path}:/data"], (), does_slurm_set_root=does_slurm_set_root
    )
    (role_bundle / "config.json").write_text(json.dumps(made))
    done = subprocess.run(
        ["runc", f"--root={tmp_path}/runc", "run", f"--bundle={role_bundle}", tmp_path.name],
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert "arguments: --help" in lines and "user: 0" in lines
    assert "variable: HOME=/home/of image" in lines
    assert "root: touch: /etc/new_file: Read-only file system" in lines
    targets = [line.split()[2] for line in lines if line.startswith("mount: ")]
    assert {"/", "/data", "/dev/shm", "/proc", "/sys", "/tmp"} <= {*targets}


def test_bundle_of_another_user_is_refused(tmp_path: Path) -> None:
    image = write_bundle(tmp_path / "bundle")
    content = json.loads((image / "config.json").read_text())
    content["linux"]["uidMappings"] = [{"containerID": 0, "hostID": os.getuid() + 1, "size": 5}]
    (image / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"do not contain id {os.getuid()} of this user"):
        build_bundle_config(image, [], (), does_slurm_set_root=False)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("slurm-wlm 22.05.8", False), ("slurm 23.02.0", True), ("slurm 25.11.0-0rc1", True)],
)
def test_slurm_version_decides_about_container_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, expected: bool
) -> None:
    stand_in(tmp_path, monkeypatch, "srun", f"echo {printed}")
    assert has_container_tasks() == expected


def test_old_slurm_refuses_several_ranks_in_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "bundle")
    stand_in(tmp_path, monkeypatch, "srun", "echo slurm-wlm 22.05.8")
    with pytest.raises(ConfigError, match="critic has 2 ranks, but this release of Slurm"):
        SlurmJobs().test(config(tmp_path, "critic.parallel.data=2"), tmp_path / "job.sh")


def test_dry_launch_prints_the_bundle_steps_that_the_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path / "bundle")
    monkeypatch.setenv("ALIGNER_CACHE", f"{tmp_path}/cache")
    plan = plan_run(config(tmp_path, "cluster.slurm.mounts=[/tmp:/outside]"))
    text = render_preview(plan, NOTHING_EXPECTED)
    (line,) = [line for line in text.splitlines() if " --job-name=critic-2 " in line]
    words = shlex.split(line.removeprefix("# ").replace("CORES", "6"))
    assert f"--container={tmp_path}/run/bundles/critic" in words
    assert not (tmp_path / "run").exists()

    stand_in(
        tmp_path,
        monkeypatch,
        "srun",
        '[ "$1" = --version ] && echo slurm 23.11.1 || printf "%s\\n" "$@" > "$RECORDED"',
    )
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded"))
    layout = compute_job_layout(plan.config)
    nodes = {
        group: Nodes(placement.component, (f"NODE{placement.component}",), "10.0.0.1", 6)
        for group, placement in layout.placements.items()
    }
    with FreePorts() as ports:
        steps = SlurmSteps(layout, Allocation("7", nodes), plan.config, ports)
        steps._started = 1
        steps.start("critic")
        while steps.running:
            steps.poll()
    assert (tmp_path / "recorded").read_text().splitlines() == words[1:]
    written = json.loads((tmp_path / "run/bundles/critic/config.json").read_text())
    assert [mount["destination"] for mount in written["mounts"][-3:]] == [
        f"{tmp_path}/run",
        f"{tmp_path}/cache",
        "/outside",
    ]


def test_rank_in_bundle_receives_each_signal_once(tmp_path: Path) -> None:
    image = write_bundle(tmp_path / "bundle")
    made = config(tmp_path)
    placement = compute_job_layout(made).placements["critic"]
    file = tmp_path / "run" / "bundles" / "critic-1.signal"
    file.parent.mkdir(parents=True)
    file.write_text("0 0\n")
    lines = list_bundle_shell_lines(made, "critic", str(image), 1, placement, "critic-1")
    program = tmp_path / "rank.py"
    program.write_text(_RANK)
    shell = ("sh", "-c", "; ".join(["trap '' USR1", *lines, 'exec "$@"']), "sh")
    rank = subprocess.Popen(
        [*shell, sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        send_to_bundle_step(made, "critic-1", number)
        assert rank.stdout.readline() == f"{number.value}\n"
    time.sleep(1.5)  # the shell looks once per second
    rank.kill()
    assert rank.stdout.read() == ""
    rank.wait()


def problems(tmp_path: Path, *overrides: str, image: str | None = None) -> list[str]:
    return [
        *find_problems(config(tmp_path, *overrides, image=image), None, NOTHING_EXPECTED),
    ]


def test_image_without_bundle_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path)
    assert problem.startswith(f"cluster.slurm.image={tmp_path}/bundle: must be the absolute path")
    write_bundle(tmp_path / "bundle")
    assert problems(tmp_path) == []
    (problem,) = problems(tmp_path, "cluster.slurm.roles.critic.image='REGISTRY#NAME'")
    assert problem.startswith("cluster.slurm.roles.critic.image=REGISTRY#NAME: must be")
    shutil.rmtree(tmp_path / "bundle" / "rootfs")
    (problem,) = problems(tmp_path)
    assert f"its files are missing, {tmp_path}/bundle/rootfs is not a directory" in problem
    (problem,) = problems(tmp_path, image="null")
    assert problem.startswith("cluster.slurm.container_runtime=oci: has no effect")


def test_variables_that_pyxis_discards_are_refused(tmp_path: Path) -> None:
    given = (
        "cluster.slurm.container_runtime=pyxis",
        "+cluster.slurm.roles.critic.environment.ENROOT_DATA_PATH=/raid",
    )
    (problem,) = problems(tmp_path, *given, image="'REGISTRY#NAME'")
    assert problem.startswith(
        "cluster.slurm.roles.critic.environment.ENROOT_DATA_PATH: has no effect, because Pyxis"
    )


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.mark.skipif(why_no_containers() is not None, reason=str(why_no_containers()))
def test_job_steps_run_in_the_containers_of_a_bundle(slurm: SlurmCluster, tmp_path: Path) -> None:
    image = write_bundle(tmp_path / "bundle")
    add_busybox(image)
    run, cache, data = (tmp_path / name for name in ("run", "cache", "data"))
    data.mkdir()
    command = [
        *(sys.executable, "-m", "aligner", "launch", "experiment=tiny_ppo", f"run.dir={run}"),
        *("cluster=slurm", "cluster.slurm.gpus=none", "cluster.slurm.requeue=false"),
        *("cluster.slurm.container_runtime=oci", f"cluster.slurm.image={image}"),
        *(f"cluster.slurm.mounts=[{data}:/data:ro]", "server.max_restarts=0"),
        *("+cluster.slurm.environment.KIND=configuration", "cluster.threads_per_rank=3"),
    ]
    environment = {
        **slurm.environment,
        "PYTHONPATH": str(REPOSITORY),
        "ALIGNER_CACHE": str(cache),
        "KIND": "shell",
        "OF_JOB": "1",
    }
    launched = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert launched.returncode == 0, launched.stderr
    (number,) = [
        line.removeprefix("job ")
        for line in launched.stdout.splitlines()
        if line.startswith("job ")
    ]
    deadline = time.monotonic() + 120
    while (state := slurm.state(number))["JobState"] not in ("COMPLETED", "FAILED"):
        assert time.monotonic() < deadline, state
        time.sleep(0.2)

    # The job ends with the exit code of the program.
    job_log = (run / "logs" / f"job-{number}.log").read_text()
    assert "exited with code 3" in job_log and state["ExitCode"] == "1:0", job_log
    for role, arguments in (("prepare", "prepare"), ("critic", "serve role=critic")):
        text = (run / "logs" / f"{role}-0.log").read_text()
        lines = text.splitlines()
        assert f"arguments: {arguments} --config {run}/config.yaml" in lines, text
        assert f"directory: {run}" in lines and "user: 0" in lines and "written: yes" in lines
        assert "root: touch: /etc/new_file: Read-only file system" in lines, text
        # The image's variables come first, except those that the configuration sets.
        values = dict(
            line.removeprefix("variable: ").partition("=")[::2]
            for line in lines
            if line.startswith("variable: ")
        )
        assert values["PATH"] == "/opt/image:/bin" and values["HOME"] == "/home/of image"
        assert (values["OMP_NUM_THREADS"], values["KIND"]) == ("3", "configuration")
        assert (values["OF_JOB"], values["ALIGNER_CACHE"]) == ("1", str(cache))
        assert (values["SLURM_PROCID"], values["WORLD_SIZE"]) == ("0", "1")
        mounts = {
            line.split()[2]: line.split()[4].split(",")[0]
            for line in lines
            if line.startswith("mount: ")
        }
        assert {path: mounts[path] for path in ("/", str(run), str(cache), "/data")} == {
            "/": "ro",
            str(run): "rw",
            str(cache): "rw",
            "/data": "ro",
        }
        assert "/dev/shm" in mounts and "/dev/mqueue" not in mounts
