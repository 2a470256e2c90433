"""`EngineState`: the decoder, KV cache and counters that the parts of an embedded engine share."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aligner.engines.embedded.cache import KVCache
from aligner.engines.embedded.decoder import Decoder
from aligner.engines.embedded.decoder_step import Step
from aligner.engines.engine_protocol import SpanListener
from aligner.schema import SpeculationConfig


@dataclass
class EngineState:
    """Decoder, KV cache and settings of one rank of an embedded engine.

    `EmbeddedEngine` owns the object; `Scheduler` and `TokenSampler` use it. Between two steps the
    engine may change the weights, and sets `version` at the same time.
    """

    decoder: Decoder
    cache: KVCache
    """Paged KV cache."""
    forward: Callable[[Step, KVCache], Tensor]
    """Forward pass of a step: the decoder's, or its replay as a CUDA graph."""
    device: torch.device
    version: int | None = None
    """Version of the current weights; None if there are none."""
    listener: SpanListener | None = None
    """Receiver of the begin and end of each prefill; None if there is none."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Settings of speculative decoding."""
    steps_per_sync: int = 1
    """Maximum number of decode steps per host synchronization."""
    num_draft_tokens: int = 0
    """Number of draft tokens since `EmbeddedEngine.take_counts` was called last."""
    num_accepted_tokens: int = 0
    """Number of those draft tokens that were accepted."""
    num_preemptions: int = 0
    """Number of preemptions since `EmbeddedEngine.take_counts` was called last."""
