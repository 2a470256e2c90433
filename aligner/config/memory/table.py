"""The roles' memory as a table, and in words."""

from __future__ import annotations

from rich.table import Table

from aligner.config.memory.roles import Phase, RoleMemory
from aligner.config.schema import Config

COLUMNS = ("weights", "gradients", "optimizer", "activations", "cache", "engine", "total")
GIB, _MIB = 2**30, 2**20


def memory_table(config: Config, needs: tuple[RoleMemory, ...]) -> Table:
    """A line for each phase of each role, on the fullest of its devices."""
    limit = config.cluster.device_memory_gib
    unit = GIB if limit is not None or max(role.peak.total for role in needs) >= GIB else _MIB
    of = "" if limit is None else f" of {limit:g}"
    table = Table(title=f"memory of a device, {'GiB' if unit == GIB else 'MiB'}{of}", title_justify="left")
    for column in ("role", "phase", *COLUMNS, "host"):
        table.add_column(column, justify="left" if column in ("role", "phase") else "right")

    def cell(size: int) -> str:
        return f"{size / unit:.1f}" if size else "-"

    for role in needs:
        for phase in role.phases:
            is_first = phase is role.phases[0]
            name, host = (_named(role), cell(role.host)) if is_first else ("", "")
            style = "bold" if phase is role.peak else None
            table.add_row(name, phase.name, *(cell(getattr(phase, column)) for column in COLUMNS), host, style=style)
    return table


def _named(role: RoleMemory) -> str:
    return role.role if role.stages == 1 else f"{role.role}, stage {role.stage}"


def describe_phase(phase: Phase) -> str:
    """What a phase holds, in GiB."""
    parts = ((column, getattr(phase, column)) for column in COLUMNS[:-1])
    return ", ".join(f"{column} {size / GIB:.1f}" for column, size in parts if size)
