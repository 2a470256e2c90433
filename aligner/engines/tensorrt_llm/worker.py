"""What this package adds to TensorRT-LLM's workers, which import it by name; it can be imported
where TensorRT-LLM is."""

from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension


class AlignerWorker(WorkerExtension):
    """Mixed into a worker, whose `engine` it uses; no name here may be one of the worker's."""

    def forget_prefixes(self) -> None:
        """Keys and values of earlier prompts are not used again."""
        self.engine.reset_prefix_cache()
