"""A generation engine of your own: samples with the `generate` method of transformers.

Use it in a run with `engine.kind=aligner_examples.transformers_engine:TransformersEngine` and
`engine.update=in_place`. The engine generates one response at a time, so it is slow; it shows what
an engine must do:

- return the log-probs of the sampled tokens at the sampling temperature,
- take the random numbers of a response from the request's key, not from the order of requests,
- let a weight sync write the trainer's weights, under their Hugging Face names.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from aligner.data.types import Completion, CompletionReason
from aligner.engines.embedded.engine_weights import EmbeddedUpdate
from aligner.engines.engine_protocol import (
    EngineRequest,
    GenerationEngine,
    SamplingOptions,
    TokenScores,
    compute_weight_format,
)
from aligner.errors import ConfigError
from aligner.models.shape import ModelShape
from aligner.resharding.weight_update import WeightUpdate
from aligner.schema import EngineConfig


class TransformersEngine(GenerationEngine):
    """Generates with transformers; every rank is a replica of its own."""

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        settings: EngineConfig,
        rank: int,
        seed: int,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        max_sequence_length: int | None = None,
        attention: str = "sdpa",
    ) -> None:
        """Build the model without weights.

        aligner passes all arguments except `attention`, which `engine.arguments` may set.
        """
        if settings.parallel.tensor > 1:
            raise ConfigError(
                f"engine.parallel.tensor={settings.parallel.tensor}: must be 1 with"
                f" engine.kind={settings.kind}, which has the whole model on each rank"
            )
        super().__init__(shape, settings, compute_weight_format(settings, device), directory)
        # transformers takes seconds to import, and `aligner validate` only needs the class.
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory),
            dtype=self.weight_format.dtype,
            attn_implementation=attention,
        )
        # Without the model's own defaults, such as its end tokens.
        model.generation_config = GenerationConfig()
        self._model = model.to(device).eval()
        self._device = torch.device(device)
        self._seed = seed
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """Version of the weights; None during and after a failed update."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether a request is queued."""
        return bool(self._arrivals or self._scoring_requests)

    def step(self) -> None:
        """Complete all requests that have arrived."""
        self._check_awake("generate")
        self._check_weights()
        self._answer_scoring_requests()
        for request in self._take_arrivals():
            if not request.future.cancelled():
                request.resolve(self._generate(request))

    def interrupt(self) -> None:
        """Return the queued requests without tokens; no request is in flight between two steps."""
        for request in self._take_arrivals():
            nothing = torch.zeros(0)
            request.resolve(Completion(nothing.long(), nothing, nothing.long(), "interrupted"))

    def release(self, prompt_id: int, sample_index: int) -> None:
        """Do nothing: the engine keeps no KV cache."""

    def begin_update(self, version: int) -> WeightUpdate:
        """Let the weight sync write into the model's parameters."""
        self._check_can_update(version)
        self._version = None
        self._incoming_version = version

        def close(is_complete: bool) -> None:
            self._incoming_version = None
            self._version = version if is_complete else None
            self._no_weights_reason = "the last weight update failed"

        return EmbeddedUpdate(version, self.held_weights(), close)

    def held_weights(self) -> dict[str, Tensor]:
        """Return the model's parameters, which `engine.verify` compares with the trainer's."""
        return {name: each.data for name, each in self._model.named_parameters()}

    def sleep(self) -> None:
        """Drop the weights; this example keeps their memory."""
        self._check_can_sleep()
        self._is_asleep = True
        self._version = None

    def wake(self) -> None:
        """Allow weight updates again."""
        self._is_asleep = False

    def shutdown(self) -> None:
        """Do nothing: the engine has no processes."""

    def _find_unsupported(self, sampling: SamplingOptions) -> str | None:
        if sampling.returns_support:
            return "TransformersEngine does not support rollout.renormalize=true"
        if sampling.routes or sampling.grammar is not None:
            return "TransformersEngine supports neither expert routing nor structured output"
        return None

    @torch.inference_mode()
    def _generate(self, request: EngineRequest) -> Completion:
        """Return the completion of one request."""
        sampling = request.sampling
        options: dict[str, Any] = {"do_sample": False}
        if not sampling.greedy:
            options = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p or None,
            }
        prompt = request.tokens[None].to(self._device)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._compute_seed(request))
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=sampling.max_new_tokens,
                min_new_tokens=sampling.min_new_tokens or None,
                eos_token_id=list(sampling.stop_token_ids) or None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        tokens = output.sequences[0, prompt.shape[1] :].cpu()
        logits = torch.stack(output.logits, 1)[0].cpu()
        logprobs = compute_logprobs(logits, sampling.temperature).gather(1, tokens[:, None])[:, 0]
        # A stop string ends the response with the token that completes it.
        stop_end = request.find_stop_end(tokens.tolist())
        tokens = tokens[:stop_end]
        has_stopped = stop_end is not None or int(tokens[-1]) in sampling.stop_token_ids
        versions = torch.full_like(tokens, self._version or 0)
        reason: CompletionReason = "stop" if has_stopped else "length"
        return Completion(tokens, logprobs[:stop_end], versions, reason)

    def _compute_seed(self, request: EngineRequest) -> int:
        """Return the seed of a request, from the run's seed, its sample and its position."""
        position = len(request.tokens) - request.key.stream_start
        entropy = [*request.get_stream_entropy(self._seed), position]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1

    @torch.inference_mode()
    def _answer_scoring_requests(self) -> None:
        """Answer the queued calls of `score`."""
        with self._arrivals_lock:
            requests = self._scoring_requests
            self._scoring_requests = []
        for request in requests:
            logits = self._model(request.tokens[None].to(self._device)).logits[0]
            scored_logits = logits[request.start - 1 : -1].cpu()
            logprobs = compute_logprobs(scored_logits, request.temperature)
            top = logprobs.topk(request.top_logprobs)
            scored = request.tokens[request.start :, None]
            request.resolve(TokenScores(logprobs.gather(1, scored)[:, 0], top.indices, top.values))


def compute_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probs of the full distribution, [S, V]."""
    return (logits.float() / temperature).log_softmax(-1)
