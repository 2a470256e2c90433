"""Worker extension for TensorRT-LLM.

TensorRT-LLM's workers import this module by its name. It can be imported only where TensorRT-LLM is
installed.
"""

from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension


class AlignerWorker(WorkerExtension):
    """Mixin for a TensorRT-LLM worker, whose attribute `engine` it uses.

    No name in this class may occur in the worker's own class.
    """

    def clear_prefix_cache(self) -> None:
        """Reset the prefix cache, so that the KV cache of earlier prompts is not reused."""
        self.engine.reset_prefix_cache()
