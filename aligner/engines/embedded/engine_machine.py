"""What responses are computed on."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aligner.engines.embedded.cache import Cache
from aligner.engines.embedded.decoder import Decoder, Step
from aligner.engines.engine_protocol import SpanListener
from aligner.schema import SpeculationConfig


@dataclass
class Machine:
    """What responses are computed on. Between steps the engine may change the weights, and with
    them the version."""

    decoder: Decoder
    cache: Cache
    forward: Callable[[Step, Cache], Tensor]
    device: torch.device
    version: int | None = None
    listener: SpanListener | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    steps_per_sync: int = 1
    guessed: int = 0
    """Tokens that were guessed so far,"""
    accepted: int = 0
    """and those of them that were drawn."""
