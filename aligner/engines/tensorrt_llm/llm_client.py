"""Client of TensorRT-LLM: starts an asynchronous TensorRT-LLM instance and its Ray workers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.external.client import Client, shut_down_on_failure
from aligner.engines.external.responses import Response, ResponseGenerator
from aligner.engines.tensorrt_llm.llm_arguments import (
    build_llm_arguments,
    build_logprobs_arguments,
    get_llm_keywords,
    get_memory_tags,
    get_sampling_keywords,
    load_package,
)
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.paths import replace_environment
from aligner.schema import EngineConfig

NAME = "TensorRT-LLM"
# Prefixes of the environment variables of MPI launchers and Slurm. TensorRT-LLM would start MPI if
# it found them.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "SLURM_")
# Environment variables of the trainer's process group, which the workers must not join.
_PROCESS_GROUP_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def build_worker_environment(environ: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """Return the environment in which the workers start.

    It is the environment of this rank without the variables of its launcher and of its process
    group, with the workers' GPUs visible.

    Args:
        environ: Environment variables of this rank.
        devices: Indices of the workers' GPUs on the machine. Every client starts a Ray cluster of
            its own, which uses all visible GPUs.
    """
    environment = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _PROCESS_GROUP_VARIABLES
    }
    return environment | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        # Ray would replace CUDA_VISIBLE_DEVICES in each worker.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        # TensorRT-LLM would join a Ray cluster that already runs on the machine.
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "TLLM_DISABLE_MPI": "1",
        # Several threads would copy the weights of an update on CUDA streams that nothing
        # synchronizes with.
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }


def parse_gpu_index(name: str) -> int:
    """Return the index on the machine of a GPU in CUDA_VISIBLE_DEVICES.

    Args:
        name: Name of the GPU in CUDA_VISIBLE_DEVICES.

    Raises:
        AlignerError: The name is not an index. Ray and TensorRT-LLM identify GPUs by index.
    """
    try:
        return int(name)
    except ValueError as error:
        raise AlignerError(
            f"CUDA_VISIBLE_DEVICES contains {name}: TensorRT-LLM requires GPU indices, such as 0,1"
        ) from error


class TensorRTLLMClient(Client):
    """Client of one TensorRT-LLM instance and its workers.

    The workers end with this process at the latest.
    """

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        seed: int,
        dtype: torch.dtype,
        devices: Sequence[int],
        uuids: Sequence[str],
    ) -> None:
        """Start TensorRT-LLM with one worker on each device. The model has no weights yet.

        Args:
            directory: Model directory, from which only the configuration is read.
            shape: Dimensions of the model.
            settings: Section `engine` of the configuration.
            seed: Seed of the random streams of the samples.
            dtype: Data type of the model.
            devices: Indices of the workers' GPUs on the machine.
            uuids: UUIDs (GPU-…) of the same GPUs.

        Raises:
            AlignerError: TensorRT-LLM is not installed or too old, it did not start in time, or the
                workers run on other GPUs.
        """
        super().__init__(NAME, settings.tensorrt_llm.timeout_s)
        self._worker_count = settings.parallel.tensor
        self._update_timeout_s = settings.update_timeout_s
        self._is_update_open = False
        """Whether a weight update has loaded tensors and was not finished."""
        with shut_down_on_failure(NAME, self.shutdown):
            with replace_environment(build_worker_environment(os.environ, devices)):
                # The import starts MPI if it finds a launcher's environment variables, so it must
                # happen in the workers' environment.
                package = load_package()
                self._sampling_keywords = get_sampling_keywords()
                arguments = build_llm_arguments(
                    get_llm_keywords(), self._sampling_keywords, directory, shape, settings, dtype
                )
                self._memory_tags = get_memory_tags() if settings.sleep else ((), ())
                self._llm = package.AsyncLLM(**arguments)
                self._exit_stack.callback(self._llm.shutdown)
                self._loop.run(
                    "starting (engine.tensorrt_llm.timeout_s)",
                    self._llm.setup_async(),
                    self._timeout_s,
                )

            self._check_gpus(uuids)
            self._sampling_params_class = package.SamplingParams
            timeout_key = "engine.tensorrt_llm.timeout_s"
            # `min_tokens` of TensorRT-LLM does not affect `stop_token_ids`; see `_start_request`.
            self._response_generator = ResponseGenerator(
                NAME,
                self._start_request,
                seed,
                self._timeout_s,
                timeout_key,
                supports_min_tokens=False,
            )

    def _start_request(
        self,
        tokens: list[int],
        response: Response,
        options: SamplingOptions,
        seed: int,
        tokens_to_minimum: int,
    ) -> Any:
        """Start the generation of a response, and return TensorRT-LLM's stream.

        Stop tokens are passed as stop token ids and not as `end_id`, because only the former become
        part of the output. TensorRT-LLM's own minimum length affects only `end_id`. A response that
        has not reached its minimum length is therefore requested with the stop tokens as bad
        tokens.

        Args:
            tokens: Prompt and the tokens generated so far.
            response: The response.
            options: Sampling parameters.
            seed: Seed of this request.
            tokens_to_minimum: Maximum number of tokens of a request without stop tokens; 0 means
                that stop tokens are allowed, up to `Response.max_tokens`.
        """
        stop_token_ids = list(options.stop_token_ids)
        # Below the minimum length, stop tokens are forbidden. Afterwards, they end the response.
        stop_arguments = {}
        if tokens_to_minimum:
            stop_arguments["bad_token_ids"] = stop_token_ids
        elif stop_token_ids:
            stop_arguments["stop_token_ids"] = stop_token_ids

        sampling = self._sampling_params_class(
            max_tokens=tokens_to_minimum or response.max_tokens - len(response.tokens),
            temperature=options.temperature,
            top_k=1 if options.greedy else options.top_k,
            top_p=None if options.greedy else options.top_p,
            seed=None if options.greedy else seed,
            logprobs=1,
            end_id=-1,
            detokenize=False,
            include_stop_str_in_output=True,
            **stop_arguments,
            **build_logprobs_arguments(self._sampling_keywords, options),
        )
        return self._llm.generate_async(inputs=tokens, sampling_params=sampling, streaming=True)

    def pause_generation(self, *, interrupt_responses: bool) -> None:
        """Pause generation before a weight update (see `Client.pause_generation`).

        If the last update was not finished, all workers forget it. Otherwise workers that did not
        fail would treat the new update as the rest of the last one.
        """
        super().pause_generation(interrupt_responses=interrupt_responses)
        if self._is_update_open:
            self._call_workers("abandon_update")
            self._is_update_open = False

    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load tensors, or finish a weight update.

        Args:
            handles: Handles of the tensors on every worker's GPU; None finishes the update and
                clears the KV cache.
        """
        # Set before the call: workers may have loaded tensors when it fails.
        self._is_update_open = True
        self._call_workers("update_weights", handles, timeout_s=self._update_timeout_s)
        self._is_update_open = handles is not None

    def release_memory(self) -> None:
        """Free the memory of the model and of the KV cache, whose contents are lost."""
        # The cached prefixes refer to blocks of the KV cache, whose contents are lost.
        self._call_workers("clear_prefix_cache")
        model_tags, cache_tags = self._memory_tags
        self._loop.run(
            "releasing GPU memory", self._llm.release([*model_tags, *cache_tags]), self._timeout_s
        )

    def resume_memory(self, *, cache: bool) -> None:
        """Allocate memory again after `release_memory`.

        Args:
            cache: Whether to allocate the memory of the KV cache; otherwise that of the model.
        """
        model_tags, cache_tags = self._memory_tags
        tags = cache_tags if cache else model_tags
        self._loop.run("reallocating GPU memory", self._llm.resume(list(tags)), self._timeout_s)

    def _call_workers(
        self, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every worker, and return the answers in rank order.

        Args:
            method: Name of the method.
            arguments: Arguments of the call, the same for every worker.
            timeout_s: Timeout in seconds; None means `engine.tensorrt_llm.timeout_s`.

        Raises:
            AlignerError: The call failed on a worker, timed out, or not all workers answered.
        """
        call = self._llm.collective_rpc(method, args=arguments)
        try:
            answers: list[Any] = self._loop.run(method, call, timeout_s or self._timeout_s)
        except AlignerError:
            raise
        except Exception as error:
            raise AlignerError(
                f"TensorRT-LLM workers failed in {method}: {type(error).__name__}: {error}"
            ) from error

        if len(answers) != self._worker_count:
            raise AlignerError(
                f"{method}: only {len(answers)} of {self._worker_count} TensorRT-LLM workers"
                " answered"
            )
        # A worker's failure may arrive as its answer instead of an exception of the call.
        for rank, answer in enumerate(answers):
            if answer is False or isinstance(answer, BaseException):
                raise AlignerError(f"TensorRT-LLM worker {rank} failed in {method}: {answer!r}")
        return answers

    def _check_gpus(self, uuids: Sequence[str]) -> None:
        """Raise AlignerError if the workers run on other GPUs than the given ones."""
        actual = sorted(self._call_workers("report_device_id"))
        expected = sorted(uuids)
        if actual != expected:
            raise AlignerError(
                f"TensorRT-LLM workers run on the GPUs {', '.join(actual)}, but the replica's ranks"
                f" run on {', '.join(expected)}"
            )
