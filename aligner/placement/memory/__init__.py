"""How much memory every role needs on one device, by arithmetic alone: docs/memory.md."""
