"""Builds the images of the Dockerfile without NVIDIA's registry: stand-ins of the base images, and
buildah.

- The stand-in of PYTHON_IMAGE is a Debian system with Python and pip.
- The stand-in of BASE_IMAGE adds torch, transformers and stubs of the packages that need a GPU. Like
  the release image on a machine without a driver, transformer-engine is installed and cannot be
  imported.

The files of both, and the wheels that the builds install, are made once and kept in aligner's cache
directory. A build then needs no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

from aligner.paths import get_cache_directory
from container.pins import pinned, wanted
from tests.agents.container_engine import write_engine_settings

REPOSITORY = Path(__file__).parents[2]
PYTHON_IMAGE = "localhost/aligner-test-python"
BASE_IMAGE = "localhost/aligner-test-base"
PACKAGES = "usr/local/lib/python3.11/dist-packages"
"""Directory of the packages in the stand-ins, relative to the root."""

_NEEDED = ("buildah", "podman", "crun", "runc", "debootstrap", "umoci")
_SUITE, _PYTHON = "bookworm", "3.11"
_DEBIAN_PACKAGES = ("python3", "python3-pip", "libpython3.11", "ca-certificates")
# Packages of TensorRT-LLM 1.2's release image that aligner also uses. Their versions are those that
# the release requires, except for torch, whose build is not public.
_BASE_PACKAGES = ("numpy==1.26.4", "transformers==4.57.3", "huggingface_hub==0.36.0")
_EXTRAS = ("server", "demo", "sentiment", "verify", "tensorrt_llm", "wandb", "mlflow", "view")
_NO_DRIVER = (
    "raise OSError('libcuda.so.1: cannot open shared object file: No such file or directory')\n"
)
# Content of the stubs' modules, by distribution.
_STUBS = {
    ("tensorrt_llm", "1.2.0"): _NO_DRIVER,
    ("transformer_engine", "2.9.0"): _NO_DRIVER,
    ("apex", "0.1"): "",
}
# Packages without a wheel in the index; they are pure Python.
_SOURCE_PACKAGES = ("antlr4-python3-runtime",)
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)

# With cgroups v1 and v2 together, crun refuses to start a container unless the mount of version 2 is
# hidden. Without CAP_SYS_RESOURCE, podman cannot raise limits.
_PODMAN = """#!/bin/sh
exec unshare --mount sh -c 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"' sh {podman} "$@"
"""


def why_not() -> str | None:
    """Return the reason why images cannot be built on this machine, or None if they can."""
    if os.geteuid() != 0:
        return "debootstrap and buildah's chroot isolation need root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in _NEEDED if shutil.which(name, path=path) is None]
    return f"no {', '.join(missing)}: `make test-container` installs them" if missing else None


@dataclass(frozen=True)
class BuiltImage:
    """An image, and the cost of its build."""

    name: str
    seconds: float
    size_mib: int


class ImageStore:
    """Images of a test session, in their own directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheelhouse\n")
        self._podman = directory / "podman"
        self._podman.write_text(_PODMAN.format(podman=shutil.which("podman")))
        self._podman.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
            **write_engine_settings(directory, "overlay"),
        }

    def buildah(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run buildah; a failed command raises AssertionError with the end of its output."""
        return self._run("buildah", *arguments, check=check)

    def podman(
        self, *arguments: str, check: bool = True, timeout_s: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run podman; see `buildah`."""
        return self._run(str(self._podman), *arguments, check=check, timeout_s=timeout_s)

    def _run(
        self, *command: str, check: bool, timeout_s: float = 7200
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            env=self._environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )
        return done

    def create_image(
        self, name: str, archives: Iterable[Path], base: str = "scratch", change: str = ""
    ) -> None:
        """Create an image from the files of archives.

        Args:
            name: Name of the image.
            archives: Archives whose files are added to the base.
            base: Image that the new image extends.
            change: Shell command that runs in the image afterwards.
        """
        container = self.buildah("from", base).stdout.strip()
        for archive in archives:
            self.buildah("add", "--quiet", container, str(archive), "/")
        if change:
            root = ("--user=root", "--isolation=chroot")
            self.buildah("run", *root, container, "--", "sh", "-ec", change)
        self.buildah("config", "--user=root", "--entrypoint=[]", "--workingdir=/", container)
        self.buildah("commit", "--quiet", container, name)
        self.buildah("rm", container)

    def build(
        self, target: str, name: str, arguments: Mapping[str, str], check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Build a target of the Dockerfile, with the wheels of the cache as the only index."""
        return self.buildah(
            "build",
            "--isolation=chroot",
            "--layers",
            "--pull-never",
            f"--target={target}",
            f"--tag={name}",
            f"--volume={_make_wheelhouse()}:/wheelhouse:ro",
            f"--volume={self._directory}/pip.conf:/etc/pip.conf:ro",
            *(f"--build-arg={key}={value}" for key, value in arguments.items()),
            ".",
            check=check,
        )

    def build_measured(self, target: str, name: str, arguments: Mapping[str, str]) -> BuiltImage:
        """Build a target, and return the time and size that it took."""
        begin = time.monotonic()
        self.build(target, name, arguments)
        seconds = time.monotonic() - begin
        size = int(self.podman("inspect", "--format={{.Size}}", name).stdout)
        return BuiltImage(name, seconds, size // 2**20)

    def create_bases(self) -> None:
        """Create the stand-ins of both base images."""
        self.create_image(PYTHON_IMAGE, [_make_python_archive()])
        self.create_image(BASE_IMAGE, [_make_base_archive()], base=PYTHON_IMAGE)

    def unpack_bundle(self, image: str, bundle: Path) -> None:
        """Unpack an image into an OCI bundle, with umoci."""
        layout = self._directory / "layout"
        self.buildah("push", "--quiet", "--disable-compression", image, f"oci:{layout}:image")
        self._run(
            *("umoci", "unpack", "--rootless", "--image", f"{layout}:image", str(bundle)),
            check=True,
        )
        shutil.rmtree(layout)

    def remove(self) -> None:
        """Remove all images and their files."""
        self.buildah("rm", "--all", check=False)
        self.buildah("rmi", "--all", "--force", check=False)
        self._run("umount", str(self._directory / "graph" / "overlay"), check=False)
        shutil.rmtree(self._directory, ignore_errors=True)


def _get_key(*parts: object) -> str:
    """Return a name for files that depend on the given values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _get_cache() -> Path:
    directory = get_cache_directory() / "container_tests"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _make_python_archive() -> Path:
    """Return an archive of a Debian system with Python; see `_DEBIAN_PACKAGES`."""
    archive = _get_cache() / f"python-{_get_key(_SUITE, _DEBIAN_PACKAGES)}.tar"
    if archive.exists():
        return archive
    root = archive.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    _run_command(
        "debootstrap",
        "--variant=minbase",
        f"--include={','.join(_DEBIAN_PACKAGES)}",
        _SUITE,
        str(root),
        *_find_mirrors(),
    )
    # pip refuses to install system packages otherwise; the real base images allow it.
    next(root.glob("usr/lib/python3*/EXTERNALLY-MANAGED")).unlink()
    (root / "usr/bin/python").symlink_to("python3")
    shutil.rmtree(root / "var/cache/apt")
    shutil.rmtree(root / "var/lib/apt/lists")
    _write_archive(archive, root)
    shutil.rmtree(root)
    return archive


def _find_mirrors() -> list[str]:
    """Return the Debian mirror that apt uses on this machine; none for debootstrap's default."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    mirrors = [line.split()[1] for line in listed.splitlines() if line.startswith(f"{_SUITE} ")]
    return mirrors[:1]


def _make_base_archive() -> Path:
    """Return an archive of the packages that the stand-in of BASE_IMAGE adds."""
    pins = pinned((REPOSITORY / "constraints.txt").read_text())
    packages = (f"torch=={pins['torch']}", *_BASE_PACKAGES)
    archive = _get_cache() / f"base-{_get_key(packages, sorted(_STUBS.items()))}.tar"
    if archive.exists():
        return archive
    root = archive.with_suffix(".root")
    shutil.rmtree(root, ignore_errors=True)
    directory = root / PACKAGES
    _run_pip("install", f"--target={directory}", *packages)
    for (name, version), content in _STUBS.items():
        write_stub(directory, name, version, content)
    _write_archive(archive, root)
    shutil.rmtree(root)
    return archive


def write_stub(directory: Path, name: str, version: str, content: str) -> None:
    """Write a package that consists of one module and its metadata."""
    (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / name / "__init__.py").write_text(content)
    metadata = directory / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "RECORD").write_text("")


def _make_wheelhouse() -> Path:
    """Return the directory of all wheels that the builds install, at the pinned versions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = (*wanted(project, _EXTRAS), "hatchling")
    constraints = REPOSITORY / "constraints.txt"
    directory = _get_cache() / f"wheels-{_get_key(sorted(names), constraints.read_text())}"
    if not directory.exists():
        unfinished = directory.with_suffix(".unfinished")
        pins = pinned(constraints.read_text())
        sources = [f"{name}=={pins[name]}" for name in _SOURCE_PACKAGES]
        _run_command(
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *(f"--wheel-dir={unfinished}", *sources),
        )
        _run_pip(
            "download",
            f"--find-links={unfinished}",
            f"--dest={unfinished}",
            f"--constraint={constraints}",
            *names,
        )
        unfinished.rename(directory)
    return directory


def _run_pip(action: str, *arguments: str) -> None:
    """Run pip of this environment, for the Python of the stand-ins."""
    _run_command(
        *(sys.executable, "-m", "pip", action, "--quiet", "--only-binary=:all:"),
        *(f"--python-version={_PYTHON}", "--implementation=cp"),
        *(f"--platform={platform}" for platform in _PLATFORMS),
        *arguments,
    )


def _write_archive(archive: Path, root: Path) -> None:
    unfinished = archive.with_suffix(".unfinished")
    with tarfile.open(unfinished, "w") as file:
        file.add(root, arcname=".")
    unfinished.rename(archive)


def _run_command(*command: str) -> None:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}"


def describe(images: Sequence[BuiltImage]) -> str:
    """Return the times and sizes of images as a table."""
    return "\n".join(
        f"{image.name:32} {image.seconds:6.0f} s {image.size_mib:6} MiB" for image in images
    )
