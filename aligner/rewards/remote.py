"""Scores over HTTP, in the shape that OpenRLHF's `remote_rm_url` has."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.rewards.http_endpoint import HttpEndpoint
from aligner.rewards.scorers import ScoringError, ScoringRequest
from aligner.values import is_finite_number


@dataclass(frozen=True)
class RemoteScorer:
    """A scorer that asks an HTTP server.

    A batch is one POST of JSON with `query` (prompt and response together), `prompts` and `labels`,
    lists with an entry a request; the answer's `rewards` has a number for each. A label is what the
    request's metadata has as `label` or `answer`, and empty text where it has neither.
    """

    url: str
    timeout_s: float
    """Until the answer is there, retries included."""

    def __call__(self, requests: Sequence[ScoringRequest]) -> list[float]:
        """One score a request. Raises as `HttpEndpoint.post`, and ScoringError for an answer of
        another shape."""
        body = {
            "query": [request.prompt + request.response for request in requests],
            "prompts": [request.prompt for request in requests],
            "labels": [
                request.metadata.get("label", request.metadata.get("answer", ""))
                for request in requests
            ],
        }
        endpoint = HttpEndpoint(self.url, self.timeout_s)
        answer, count = endpoint.post(json.dumps(body).encode()), len(requests)
        try:
            rewards: Any = json.loads(answer)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ScoringError(
                f"{self.url}: got {endpoint.shown(answer)}; expected a JSON object with `rewards`"
            ) from error
        if (
            not isinstance(rewards, list)
            or len(rewards) != count
            or not all(map(is_finite_number, rewards))
        ):
            raise ScoringError(
                f"{self.url}: got {endpoint.shown(answer)}; `rewards` must be a list of"
                f" {count} finite numbers, one for each query"
            )
        return [float(reward) for reward in rewards]
