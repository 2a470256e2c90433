"""The roles' memory as a table, and in words."""

from __future__ import annotations

from rich import box
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
    title = f"memory of a device, {'GiB' if unit == GIB else 'MiB'}{of}"
    # Narrow, for it has many columns: without lines between them, and headings that fold before numbers do.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for column in ("role", "stage", "phase"):
        table.add_column(column, no_wrap=True)
    for column in (*COLUMNS, "host"):
        table.add_column(column, justify="right", min_width=5, overflow="fold")

    def cell(size: int) -> str:
        return f"{size / unit:.1f}" if size else "-"

    for role in needs:
        first = (role.role, f"{role.stage}/{role.stages}" if role.stages > 1 else "", cell(role.host))
        for phase in role.phases:
            name, stage, host = first if phase is role.phases[0] else ("", "", "")
            style = "bold" if phase is role.peak else None
            table.add_row(name, stage, phase.name, *(cell(getattr(phase, column)) for column in COLUMNS), host, style=style)
    return table


def describe_phase(phase: Phase) -> str:
    """What a phase holds, in GiB."""
    parts = ((column, getattr(phase, column)) for column in COLUMNS[:-1])
    return ", ".join(f"{column} {size / GIB:.1f}" for column, size in parts if size)
