"""Builds the images of the Dockerfile and runs aligner in them (`make test-container`).

The containers have no network, a read-only root, and a user that the image does not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths
from tests.container.images import (
    BASE_IMAGE,
    PACKAGES,
    PYTHON_IMAGE,
    BuiltImage,
    ImageStore,
    describe,
    why_not,
    write_stub,
)
from tests.slurm_cluster import SlurmCluster, why_no_containers
from tests.system.test_slurm import submit_run

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

ARGUMENTS = {"PYTHON_IMAGE": PYTHON_IMAGE, "BASE_IMAGE": BASE_IMAGE}
TARGETS = ("server", "trainer", "cpu")
FOREIGN_USER = 12345
STEPS = 2
# A transformer-engine that can be imported: every attribute of every module is a torch module.
_IMPORTABLE = """
import sys, types, torch

class Stub(types.ModuleType):
    __path__ = []
    __version__ = "2.9.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})

for name in ("pytorch", "common", "common.recipe", "pytorch.distributed", "pytorch.float8_tensor"):
    sys.modules[f"transformer_engine.{name}"] = Stub(f"transformer_engine.{name}")
pytorch, common = (sys.modules[f"transformer_engine.{name}"] for name in ("pytorch", "common"))
common.recipe = sys.modules["transformer_engine.common.recipe"]
pytorch.distributed = sys.modules["transformer_engine.pytorch.distributed"]
__version__ = "2.9.0"
"""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    made = ImageStore(tmp_path_factory.mktemp("images"))
    try:
        made.create_bases()
        yield made
    finally:
        made.remove()


@pytest.fixture(scope="session")
def images(store: ImageStore) -> dict[str, BuiltImage]:
    built = {
        target: store.build_measured(target, f"localhost/aligner-{target}", ARGUMENTS)
        for target in TARGETS
    }
    print("\n" + describe([*built.values()]))
    return built


def run(
    store: ImageStore, image: BuiltImage, *arguments: str, mounts: dict[Path, str] | None = None
) -> str:
    """Run aligner in a container without network and with a read-only root, as a foreign user.

    Returns its standard output.
    """
    volumes = [f"--volume={source}:{target}" for source, target in (mounts or {}).items()]
    return store.podman(
        *("run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp:mode=1777"),
        *(f"--user={FOREIGN_USER}:{FOREIGN_USER}", "--shm-size=1g", "--env=ALIGNER_CACHE=/cache"),
        *volumes,
        image.name,
        *arguments,
    ).stdout


def run_training(
    store: ImageStore, image: BuiltImage, directory: Path, mounts: dict[Path, str] | None = None
) -> None:
    """Train two steps of `tiny_ppo` with its servers in a container."""
    own_mounts = {directory / "runs": "/runs", directory / "cache": "/cache"}
    for source in own_mounts:
        source.mkdir()
        source.chmod(0o777)
    printed = run(
        *(store, image, "launch", "experiment=tiny_ppo", f"run.steps={STEPS}", "run.dir=/runs/run"),
        mounts={**own_mounts, **(mounts or {})},
    )
    paths = RunPaths(directory / "runs" / "run")
    assert [step["step"] for step in read_metrics(paths.metrics)] == [1, 2], printed
    assert paths.config.stat().st_uid == FOREIGN_USER


@pytest.mark.parametrize("target", TARGETS)
def test_image_starts_and_validates(
    store: ImageStore, images: dict[str, BuiltImage], target: str
) -> None:
    assert run(store, images[target], "--version").startswith("aligner ")
    # The trainer's image has no servers.
    experiment = "arithmetic_sft" if target == "trainer" else "tiny_ppo"
    assert "trainer" in run(store, images[target], "validate", f"experiment={experiment}")


@pytest.mark.parametrize("target", ["server", "cpu"])
def test_training_run_with_servers_completes(
    store: ImageStore, images: dict[str, BuiltImage], tmp_path: Path, target: str
) -> None:
    # In the server image, transformer-engine is installed and fails without a driver.
    run_training(store, images[target], tmp_path)


def test_importable_transformer_engine_does_not_break_cpu_runs(
    store: ImageStore, images: dict[str, BuiltImage], tmp_path: Path
) -> None:
    write_stub(tmp_path / "stub", "transformer_engine", "2.9.0", _IMPORTABLE)
    mounts = {tmp_path / "stub/transformer_engine": f"/{PACKAGES}/transformer_engine:ro"}
    run_training(store, images["server"], tmp_path, mounts)


def test_base_that_violates_a_requirement_fails_the_build(
    store: ImageStore, images: dict[str, BuiltImage]
) -> None:
    # All other requirements are already part of the server image, so this build is short.
    metadata = f"/{PACKAGES}/pyarrow-*.dist-info"
    store.create_image(
        "localhost/aligner-test-bad",
        [],
        base=images["server"].name,
        change=(
            f"sed -i 's/^Version: .*/Version: 26.0.0/' {metadata}/METADATA;"
            f" mv {metadata} /{PACKAGES}/pyarrow-26.0.0.dist-info; userdel aligner"
        ),
    )
    built = store.build(
        "server",
        "localhost/aligner-bad",
        {**ARGUMENTS, "BASE_IMAGE": "localhost/aligner-test-bad"},
        check=False,
    )
    assert built.returncode != 0
    assert "server image: pyarrow is 26.0.0" in built.stdout + built.stderr


@pytest.mark.skipif(why_no_containers() is not None, reason=str(why_no_containers()))
def test_slurm_job_trains_in_containers_of_the_server_image(
    store: ImageStore, images: dict[str, BuiltImage], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    store.unpack_bundle(images["server"].name, bundle)
    with SlurmCluster(tmp_path / "cluster") as slurm:
        slurm.environment["ALIGNER_CACHE"] = str(tmp_path / "cache")
        begin = time.monotonic()
        job = submit_run(
            slurm,
            tmp_path / "run",
            "cluster=slurm",
            "cluster.slurm.gpus=none",
            "cluster.slurm.container_runtime=oci",
            f"cluster.slurm.image={bundle}",
            f"run.steps={STEPS}",
        )
        state = job.wait_for_state("COMPLETED", "FAILED", "CANCELLED")
        assert state["JobState"] == "COMPLETED", job.log
        print(f"\nSlurm job in containers: {time.monotonic() - begin:.0f} s")
    assert [step["step"] for step in read_metrics(job.paths.metrics)] == [1, 2]
