"""What the commands have in common that take a configuration: `key=value` overrides, and your own groups of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aligner.config.prerequisites import RunPlan


def add_configured(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], help: str
) -> argparse.ArgumentParser:
    """Add such a command to a parser's subcommands."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    command.add_argument("overrides", nargs="*", metavar="key=value", help="experiment=NAME, and keys that differ from it")
    command.add_argument("--config-dir", type=Path, metavar="DIR", help="your own conf groups, such as DIR/experiment/")
    command.set_defaults(run=run)
    return command


def run_plan(parsed: argparse.Namespace) -> RunPlan:
    """The configuration that a command line asks for, and the experiments whose results it needs. Raises ConfigError."""
    from aligner.config.compose import compose_config
    from aligner.config.prerequisites import plan_run

    return plan_run(compose_config(parsed.overrides, parsed.config_dir), parsed.config_dir)
