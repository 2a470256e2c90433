"""Write the requirements and constraints files with which pip installs aligner into an image.

    pins.py HELD REQUIREMENTS EXTRA…

Run it in the directory of pyproject.toml and constraints.txt; it writes HELD and REQUIREMENTS.

- REQUIREMENTS lists the dependencies of the project and of the given extras that the base image
  lacks, at the versions of constraints.txt.
- HELD is a constraints file: the versions that the base image contains, and the versions of
  constraints.txt for all other packages. It keeps pip from replacing packages of the base image,
  because TensorRT-LLM works only with the versions that it was built with.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

import tomllib

# A version according to PEP 440. Written here because an image need not contain `packaging`.
_VERSION = re.compile(
    r"v?([0-9]+!)?[0-9]+(\.[0-9]+)*"
    r"([-_.]?(a|b|c|rc|alpha|beta|pre|preview)[-_.]?[0-9]*)?"
    r"(-[0-9]+|[-_.]?(post|rev|r)[-_.]?[0-9]*)?"
    r"([-_.]?dev[-_.]?[0-9]*)?"
    r"(\+[a-z0-9]+([-_.][a-z0-9]+)*)?",
    re.IGNORECASE | re.ASCII,
)


def canonical(name: str) -> str:
    """Return the normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Return the version of each distribution in this environment, by normalized name."""
    versions: dict[str, str] = {}
    for found in distributions():
        # The first one on the path is the one that is imported.
        if found.metadata["Name"]:
            versions.setdefault(canonical(found.metadata["Name"]), found.version)
    return versions


def pinned(constraints: str) -> dict[str, str]:
    """Return the versions that a constraints file pins, by normalized name."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return {
        canonical(name): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def wanted(project: Mapping[str, object], extras: Sequence[str]) -> list[str]:
    """Return the names of the dependencies of a project and of some of its extras.

    Args:
        project: The table `project` of pyproject.toml.
        extras: Names of extras.
    """
    table: Mapping[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    lines = [*project["dependencies"], *(line for extra in extras for line in table[extra])]  # type: ignore[misc]
    return [canonical(re.match(r"[\w.-]+", line)[0]) for line in lines]  # type: ignore[index]


def plan(
    has: Mapping[str, str], pins: Mapping[str, str], names: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the constraints and the requirements of an image, as versions by package name.

    A package of the base image whose version does not follow PEP 440, such as Debian's
    `1.7build1`, is not constrained: pip rejects a whole file for one such line.

    Args:
        has: Versions of the packages in the base image.
        pins: Versions of constraints.txt.
        names: Dependencies that the image needs.

    Raises:
        SystemExit: If a dependency is neither in the base image nor pinned.
    """
    lacking = [name for name in names if name not in has]
    if unpinned := [name for name in lacking if name not in pins]:
        sys.exit(f"constraints.txt: no version of {', '.join(unpinned)}; add a pin")
    holds = {
        name: version for name, version in {**pins, **has}.items() if _VERSION.fullmatch(version)
    }
    return holds, {name: pins[name] for name in lacking}


def main(held: Path, requirements: Path, *extras: str) -> None:
    """Write the constraints file `held` and the requirements file."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    holds, missing = plan(
        installed(), pinned(Path("constraints.txt").read_text()), wanted(project, extras)
    )
    for file, versions in ((held, holds), (requirements, missing)):
        file.write_text(
            "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
