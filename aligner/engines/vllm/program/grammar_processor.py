"""Logits processor of vLLM's workers that masks the tokens that a grammar does not allow.

The masks are computed by `aligner/data/grammar_matcher.py`, the file that the trainer uses, and not
by vLLM's structured outputs: these allow only the model's own end token at the end of a text, and
need a tokenizer of the transformers package.

Requests pass the grammar in `SamplingParams.extra_args`, with these fields:

- `grammar`, `stop_token_ids`: the grammar, and the tokens that may end a complete text.
- `grammar_tokens`: number of tokens at the end of the prompt that belong to the text already.
- `matcher_file`: path of `grammar_matcher.py`.
- `vocabulary_file`: path of the file that `GrammarVocabulary.save` has written.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample import logits_processor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata


class GrammarProcessor(AdapterLogitsProcessor):
    """Masks the logits of all requests that follow a grammar.

    `mask_logits` does this before vLLM computes log-probs, so that these are normalized over the
    allowed tokens. `apply`, which vLLM calls afterwards, does nothing.
    """

    input_batch: Any = None
    """The batch of vLLM's model runner, which `receive.AlignerWorker` sets."""

    def is_argmax_invariant(self) -> bool:
        """Return False, because a mask can change the most probable token."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """Return a function that masks the logits of a request; None without a grammar."""
        arguments = params.extra_args or {}
        return _MaskedRequest(arguments).mask if "grammar" in arguments else None

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the requests of the batch."""
        super().update_state(batch_update)
        # With asynchronous scheduling, vLLM waits for the newest tokens on the host only if a
        # logits processor needs them. This would slow down batches without grammars.
        if self.input_batch is not None:
            self.input_batch.logitsprocs_need_output_token_ids = bool(self.req_info)

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits, which `mask_logits` has masked."""
        return logits

    def mask_logits(self, logits: Tensor) -> None:
        """Mask the logits [B, V] of the batch, in place."""
        for row, mask_row in self.req_info.items():
            mask_row(logits[row])


class _MaskedRequest:
    """The state of a request in its grammar."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """
        Args:
            arguments: `SamplingParams.extra_args` of the request.
        """
        self._prompt_tokens: int = arguments["grammar_tokens"]
        load = _load_vocabulary(arguments["matcher_file"], arguments["vocabulary_file"])
        self._matcher = load.start(arguments["grammar"], arguments["stop_token_ids"])
        self._accepted_tokens: int | None = None
        """Number of generated tokens that the matcher has accepted; None before the first call."""

    def mask(self, prompt_tokens: list[int], output_tokens: list[int], logits: Tensor) -> Tensor:
        """Mask the logits [V] of the next token in place, and return them."""
        if self._accepted_tokens is None:
            begin = len(prompt_tokens) - self._prompt_tokens
            self._matcher.accept(prompt_tokens[begin:])
            self._accepted_tokens = 0
        self._matcher.accept(output_tokens[self._accepted_tokens :])
        self._accepted_tokens = len(output_tokens)

        bits = np.unpackbits(self._matcher.compute_mask().view(np.uint8), bitorder="little")
        is_allowed = torch.from_numpy(bits[: len(logits)]).to(logits.device).bool()
        # vLLM's vocabulary may be padded beyond the last bit.
        logits[len(is_allowed) :] = float("-inf")
        logits[: len(is_allowed)].masked_fill_(~is_allowed, float("-inf"))
        return logits


@functools.cache
def _load_vocabulary(matcher_file: str, vocabulary_file: str) -> Any:
    """Return the `GrammarVocabulary` that was saved to a file."""
    spec = importlib.util.spec_from_file_location("grammar_matcher", matcher_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GrammarVocabulary.load(Path(vocabulary_file))


def mask_logits(logits: Tensor, metadata: SamplingMetadata) -> None:
    """Mask the logits [B, V] of requests that follow a grammar, in place."""
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, GrammarProcessor):
            processor.mask_logits(logits)


def install() -> None:
    """Add the processor to those that vLLM creates for every model."""
    processors: list[Callable[..., Any]] = logits_processor.BUILTIN_LOGITS_PROCESSORS
    processors.append(GrammarProcessor)
