"""aligner: a Megatron-native alignment pipeline (RLHF and RLVR)."""

__version__ = "0.1.0"
