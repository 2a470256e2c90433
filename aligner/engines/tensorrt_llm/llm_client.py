"""Client of TensorRT-LLM: starts an asynchronous TensorRT-LLM instance and its Ray workers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aligner.engines.engine_protocol import SamplingOptions
from aligner.engines.foreign.client import Client, ending_on_failure
from aligner.engines.foreign.responses import Responder, Response
from aligner.engines.tensorrt_llm.llm_arguments import (
    llm_arguments,
    llm_keywords,
    load_package,
    memory_tags,
)
from aligner.errors import AlignerError
from aligner.models.shape import ModelShape
from aligner.paths import replaced_environment
from aligner.schema import EngineConfig

NAME = "TensorRT-LLM"
# Prefixes of the environment variables of MPI launchers and Slurm. TensorRT-LLM would start MPI if
# it found them.
_OTHER_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_")
# Environment variables of the trainer's process group, which the workers must not join.
_OTHER_WORLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def worker_environment(environ: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
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
        if not name.startswith(_OTHER_LAUNCHERS) and name not in _OTHER_WORLD
    }
    return environment | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "TLLM_DISABLE_MPI": "1",
        # Several threads would copy the weights of an update on CUDA streams that nothing
        # synchronizes with.
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }


def gpu_index(name: str) -> int:
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
        self._workers = settings.parallel.tensor
        self._update_timeout_s = settings.update_timeout_s
        with ending_on_failure(NAME, self.shutdown):
            with replaced_environment(worker_environment(os.environ, devices)):
                # The import starts MPI if it finds a launcher's environment variables, so it must
                # happen in the workers' environment.
                package = load_package()
                arguments = llm_arguments(llm_keywords(), directory, shape, settings, dtype)
                self._tags = memory_tags() if settings.sleep else ((), ())
                self._llm = package.AsyncLLM(**arguments)
                self._end.callback(self._llm.shutdown)
                self._loop.run(
                    "starting (engine.tensorrt_llm.timeout_s)",
                    self._llm.setup_async(),
                    self._timeout_s,
                )
            self._check_devices(uuids)
            self._sampling_params = package.SamplingParams
            timeout_key = "engine.tensorrt_llm.timeout_s"
            self._responder = Responder(
                NAME, self._draw, seed, self._timeout_s, timeout_key, has_least=False
            )

    def _draw(
        self, tokens: list[int], response: Response, options: SamplingOptions, seed: int, most: int
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
            most: Maximum number of tokens of a request without stop tokens; 0 means that stop
                tokens are allowed, up to the limit of the turn.
        """
        stops = list(options.stop_token_ids)
        sampling = self._sampling_params(
            max_tokens=most or response.limit - len(response.tokens),
            temperature=options.temperature,
            top_k=1 if options.greedy else options.top_k,
            top_p=None if options.greedy else options.top_p,
            seed=None if options.greedy else seed,
            logprobs=1,
            end_id=-1,
            detokenize=False,
            include_stop_str_in_output=True,
            # Below the minimum length, stop tokens are forbidden. Afterwards, they end the
            # response.
            **({"bad_token_ids": stops} if most else {"stop_token_ids": stops} if stops else {}),
        )
        return self._llm.generate_async(inputs=tokens, sampling_params=sampling, streaming=True)

    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load tensors, or finish a weight update.

        Args:
            handles: Handles of the tensors on every worker's GPU; None finishes the update and
                clears the KV cache.
        """
        self._call("update_weights", handles, timeout_s=self._update_timeout_s)

    def release(self) -> None:
        """Free the memory of the model and of the KV cache, whose contents are lost."""
        self._call("forget_prefixes")
        model, cache = self._tags
        self._loop.run("releasing GPU memory", self._llm.release([*model, *cache]), self._timeout_s)

    def resume(self, *, cache: bool) -> None:
        """Allocate memory again after `release`.

        Args:
            cache: Whether to allocate the memory of the KV cache; otherwise that of the model.
        """
        self._loop.run(
            "reallocating GPU memory", self._llm.resume(list(self._tags[cache])), self._timeout_s
        )

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
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
        if len(answers) != self._workers:
            raise AlignerError(
                f"{method}: only {len(answers)} of {self._workers} TensorRT-LLM workers answered"
            )
        for rank, answer in enumerate(answers):
            if answer is False or isinstance(answer, BaseException):
                raise AlignerError(f"TensorRT-LLM worker {rank} failed in {method}: {answer!r}")
        return answers

    def _check_devices(self, uuids: Sequence[str]) -> None:
        """Raise AlignerError if the workers run on other GPUs than the given ones."""
        actual = sorted(self._call("report_device_id"))
        expected = sorted(uuids)
        if actual != expected:
            raise AlignerError(
                f"TensorRT-LLM workers run on the GPUs {', '.join(actual)}, but the replica's ranks"
                f" run on {', '.join(expected)}"
            )
