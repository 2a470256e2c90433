"""Reward function of your experiment."""

from collections.abc import Sequence

from aligner.rewards.function_forms import ScoringRequest


def score(requests: Sequence[ScoringRequest]) -> list[float]:
    """Return one finite reward for each request, in the order of the requests.

    This example gives 1 to a response that contains the answer, minus a small penalty for length.

    Args:
        requests: Requests with the texts `prompt` and `response`, and the mapping `metadata` with
            the other fields of the data record.
    """
    return [
        float(request.metadata["answer"] in request.response) - 0.001 * len(request.response)
        for request in requests
    ]
