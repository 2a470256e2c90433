"""How much memory every role needs on one device, by arithmetic alone: docs/memory.md."""

from aligner.config.memory.fitting import memory_problems
from aligner.config.memory.roles import Phase, RoleMemory, memory_needs
from aligner.config.memory.table import memory_table

__all__ = ["Phase", "RoleMemory", "memory_needs", "memory_problems", "memory_table"]
