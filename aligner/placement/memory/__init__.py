"""How much memory every role needs on one device, by arithmetic alone: docs/memory.md."""

from __future__ import annotations

from aligner.placement.memory.fitting import memory_problems
from aligner.placement.memory.role_memory import Phase, RoleMemory, memory_needs, memory_table

__all__ = ["Phase", "RoleMemory", "memory_needs", "memory_problems", "memory_table"]
