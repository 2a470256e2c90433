"""Worker extension for TensorRT-LLM.

TensorRT-LLM's workers import this module by its name. It can be imported only where TensorRT-LLM is
installed.
"""

from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension

# Attribute of the model that TensorRT-LLM sets with the first bucket of a weight update, and
# deletes at the end. While it is set, further buckets do not prepare the modules for new weights.
_UPDATE_LATCH = "first_pre_reload_weights"


class AlignerWorker(WorkerExtension):
    """Mixin for a TensorRT-LLM worker, whose attribute `engine` it uses.

    No name in this class may occur in the worker's own class.
    """

    def clear_prefix_cache(self) -> None:
        """Reset the prefix cache, so that the KV cache of earlier prompts is not reused."""
        self.engine.reset_prefix_cache()

    def abandon_update(self) -> None:
        """Forget a weight update that was not finished, so that the next one starts anew.

        Must be called on all workers after a failure on any of them. Only Python attributes change,
        so the call also works after an error of CUDA.
        """
        # Some states of TensorRT-LLM have a method for this, and require the call.
        abort = getattr(super(), "abort_update_weights", None)
        if abort is not None:
            abort("the weight update was not finished")

        # Since release 1.4, the model loader holds state during an update. A worker that failed has
        # released it, the other workers have not.
        model_engine = self.engine.model_engine
        abort_loading = getattr(model_engine.model_loader, "abort_update_weights", None)
        if abort_loading is not None:
            abort_loading()
        if hasattr(model_engine.model, _UPDATE_LATCH):
            delattr(model_engine.model, _UPDATE_LATCH)
