"""A response that the embedded engine decodes: what there is of it, its row of the cache, and its
random numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from aligner.engines.embedded.sampling import renew, turn_uniforms
from aligner.engines.embedded.speculation import Lookup
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.engines.partial_response import PartialResponse


@dataclass(eq=False)
class DecodedResponse(PartialResponse):
    """A response so far, and what the engine keeps of it beside that."""

    index: int = 0
    """Among the requests."""
    row: int = -1
    """Of the cache, where it has one in use."""
    held: int = 0
    """Whose keys and values that has, when a turn begins."""
    prompt: tuple[int, ...] = ()
    numbers: np.ndarray | None = None
    """float64 [limit]: what its tokens are drawn with"""
    lookup: Lookup | None = None
    """Where its next tokens are guessed."""
    read: Tensor | None = None
    """The routes of its tokens, or of the prompt at least, when their keys and values were
    computed: [n, L, K]"""

    @property
    def length(self) -> int:
        """Prompt and response, in tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def newest(self) -> int:
        """The last token so far."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]


def in_order(responses: Iterable[DecodedResponse]) -> list[DecodedResponse]:
    """In the order of their rows."""
    return sorted(responses, key=lambda response: response.row)


def begin(
    index: int, request: GenerationRequest, options: SamplingOptions, seed: int
) -> DecodedResponse:
    """The response to a request at this place, of as much as the request has begun."""
    limit = request.limit(options)
    prompt = tuple(request.prompt.tokens.tolist())
    numbers = None if options.greedy else turn_uniforms(seed, request, prompt, limit)
    response = DecodedResponse(request, limit, index=index, prompt=prompt, numbers=numbers)
    response.take_begun(options)
    if request.begun is not None:
        renew(numbers, seed, request, response.tokens[: len(response.drawn)])
    return response
