"""What pip is to install into an image: `pins.py HELD REQUIREMENTS EXTRA…` writes both files,
beside pyproject.toml.

What the base image has stays as it is (HELD lists it, and is a constraint): TensorRT-LLM fits its
own versions alone. Of the project's dependencies and the extras named, REQUIREMENTS lists those
that it lacks, at the versions of constraints.txt, and HELD those versions for what they need in
turn.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

import tomllib

# PEP 440's, for an image need not have packaging.
_VERSION = re.compile(
    r"v?([0-9]+!)?[0-9]+(\.[0-9]+)*"
    r"([-_.]?(a|b|c|rc|alpha|beta|pre|preview)[-_.]?[0-9]*)?"
    r"(-[0-9]+|[-_.]?(post|rev|r)[-_.]?[0-9]*)?"
    r"([-_.]?dev[-_.]?[0-9]*)?"
    r"(\+[a-z0-9]+([-_.][a-z0-9]+)*)?",
    re.IGNORECASE | re.ASCII,
)


def canonical(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Versions of all that this environment has."""
    return {
        canonical(found.metadata["Name"]): found.version
        for found in distributions()
        if found.metadata["Name"]
    }


def pinned(constraints: str) -> dict[str, str]:
    """Versions that a constraints file pins."""
    lines = (line.partition("#")[0].strip() for line in constraints.splitlines())
    return {
        canonical(name): version
        for name, _, version in (line.partition("==") for line in lines if line)
    }


def wanted(project: Mapping[str, object], extras: Sequence[str]) -> list[str]:
    """Names that the project depends on, with some extras, as pyproject.toml has it."""
    table: Mapping[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    lines = [*project["dependencies"], *(line for extra in extras for line in table[extra])]  # type: ignore[misc]
    return [canonical(re.match(r"[\w.-]+", line)[0]) for line in lines]  # type: ignore[index]


def plan(
    has: Mapping[str, str], pins: Mapping[str, str], names: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """What holds, and what is to be installed of the pins. Raises SystemExit for a dependency
    without a pin.

    Nothing holds a package of the base image whose version is none of PEP 440's, such as Debian's
    `1.7build1`: one such line, and pip refuses the whole file.
    """
    lacking = [name for name in names if name not in has]
    if unpinned := [name for name in lacking if name not in pins]:
        sys.exit(f"constraints.txt has no version of {', '.join(unpinned)}; pin it there")
    holds = {
        name: version for name, version in {**pins, **has}.items() if _VERSION.fullmatch(version)
    }
    return holds, {name: pins[name] for name in lacking}


def main(held: Path, requirements: Path, *extras: str) -> None:
    """Write both files."""
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
