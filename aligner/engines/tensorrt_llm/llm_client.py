"""TensorRT-LLM's asynchronous client."""

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
_OTHER_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "SLURM_")
_OTHER_WORLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def worker_environment(environ: Mapping[str, str], devices: Sequence[int]) -> dict[str, str]:
    """The driving rank's environment without its own launcher and world, with the workers' GPUs
    visible.

    `devices` are the machine's GPU indices. Every driver starts a Ray cluster of its own, which
    takes the visible GPUs.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OTHER_LAUNCHERS) and name not in _OTHER_WORLD
    }
    return kept | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "TLLM_RAY_FORCE_LOCAL_CLUSTER": "1",
        "TLLM_DISABLE_MPI": "1",
        # Weights of an update would be copied from several threads, on streams that nothing waits
        # for.
        "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1",
    }


def gpu_index(name: str) -> int:
    """The machine's index of a GPU, which CUDA_VISIBLE_DEVICES calls so.

    Raises AlignerError where it is called otherwise: Ray and TensorRT-LLM count GPUs.
    """
    try:
        return int(name)
    except ValueError as error:
        raise AlignerError(
            f"CUDA_VISIBLE_DEVICES contains {name}: TensorRT-LLM requires GPU indices, such as 0,1"
        ) from error


class TensorRTLLMClient(Client):
    """One TensorRT-LLM instance and its workers, which end with this process if not before."""

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
        """Start one worker on each of `devices`, the machine's indices; it has no weights yet.

        `uuids` are the identifiers (GPU-…) of the same GPUs. Raises AlignerError when the workers
        run on others.
        """
        super().__init__(NAME, settings.tensorrt_llm.timeout_s)
        self._workers, self._update_timeout_s = settings.parallel.tensor, settings.update_timeout_s
        with ending_on_failure(NAME, self.shutdown):
            with replaced_environment(worker_environment(os.environ, devices)):
                package = load_package()  # which starts MPI where a launcher's variables ask for it
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
        """A stream. Stop tokens are stop words, not the end id: these are part of the output.

        The least length of TensorRT-LLM's own holds for the end id alone, so until then stop tokens
        are bad words.
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
            **({"bad_token_ids": stops} if most else {"stop_token_ids": stops} if stops else {}),
        )
        return self._llm.generate_async(inputs=tokens, sampling_params=sampling, streaming=True)

    def update_weights(self, handles: Mapping[str, Any] | None) -> None:
        """Load tensors given by handles, of every worker's GPU; None ends an update and forgets
        keys and values."""
        self._call("update_weights", handles, timeout_s=self._update_timeout_s)

    def release(self) -> None:
        """Free the memory of the model and of keys and values, which are forgotten."""
        self._call("forget_prefixes")
        model, cache = self._tags
        self._loop.run("releasing GPU memory", self._llm.release([*model, *cache]), self._timeout_s)

    def resume(self, *, cache: bool) -> None:
        """Take back the memory of keys and values, or the model's."""
        self._loop.run(
            "reallocating GPU memory", self._llm.resume(list(self._tags[cache])), self._timeout_s
        )

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of every worker; their answers, in rank order. Raises AlignerError unless every
        one succeeds."""
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
        """Raise AlignerError when the workers run on other GPUs than these."""
        found, wanted = sorted(self._call("report_device_id")), sorted(uuids)
        if found != wanted:
            raise AlignerError(
                f"TensorRT-LLM workers run on the GPUs {', '.join(found)}, but the replica's ranks"
                f" run on {', '.join(wanted)}"
            )
