"""Requests that must be refused: (endpoint, fault, tensors to change, text of the error)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aligner.servers.wire_protocol import CRITIC_INFER, CRITIC_TRAIN, REWARD_MODEL, EndpointSpec


def good(endpoint: EndpointSpec, rows: int = 3, width: int = 8) -> dict[str, NDArray]:
    """Return a request that every test server accepts."""
    targets = np.ones((rows, width - 1), dtype=np.float32)
    arrays = {
        "tokens": np.full((rows, width), 5, dtype=np.int64),
        "sequence_lengths": np.full((rows, 1), width, dtype=np.int64),
        "returns": targets,
        "prev_values": targets * 0,
        "mask": targets,
        "dummy_var": np.zeros(1, dtype=np.int64),
    }
    chosen = (
        {"tokens", "sequence_lengths"}
        if endpoint is REWARD_MODEL
        else {spec.name for spec in endpoint.inputs}
    )
    return {name: array for name, array in arrays.items() if name in chosen}


def _float(value: float, columns: int = 7) -> NDArray:
    return np.full((3, columns), value, dtype=np.float32)


def _int(value: int, columns: int = 1, rows: int = 3) -> NDArray:
    return np.full((rows, columns), value, dtype=np.int64)


# Requests that our validation refuses, also over the wire.
REFUSED: list[tuple[EndpointSpec, str, dict[str, NDArray | None], str]] = [
    (
        CRITIC_INFER,
        "id beyond the vocabulary",
        {"tokens": _int(64, 8)},
        "tokens: got 64, allowed: 0 to 63",
    ),
    (CRITIC_INFER, "negative id", {"tokens": _int(-1, 8)}, "tokens: got -1, allowed: 0 to 63"),
    (
        CRITIC_INFER,
        "length 0",
        {"sequence_lengths": _int(0)},
        "sequence_lengths: got 0, allowed: 1 to 8",
    ),
    (
        CRITIC_INFER,
        "length beyond S",
        {"sequence_lengths": _int(9)},
        "sequence_lengths: got 9, allowed: 1 to 8",
    ),
    (CRITIC_INFER, "too long", {"tokens": _int(5, 41)}, "tokens: got S=41, allowed: 1 to 40"),
    (
        CRITIC_TRAIN,
        "NaN return",
        {"returns": _float(float("nan"))},
        "returns: got NaN or infinity, allowed: finite",
    ),
    (
        CRITIC_TRAIN,
        "infinite value",
        {"prev_values": _float(float("inf"))},
        "prev_values: got NaN or infinity, allowed: finite",
    ),
    (CRITIC_TRAIN, "empty mask", {"mask": _float(0)}, "mask: got only zeros"),
    (
        CRITIC_TRAIN,
        "fractional mask",
        {"mask": _float(0.5)},
        "mask: got values other than 0 and 1",
    ),
    (
        CRITIC_TRAIN,
        "wide returns",
        {"returns": _float(1, 8)},
        r"returns: got shape [3, 8], allowed: [B, S-1] with B=3, S=8",
    ),
    (
        CRITIC_TRAIN,
        "rows differ",
        {"tokens": _int(5, 8, rows=2)},
        r"returns: got shape [3, 7], allowed: [B, S-1] with B=2, S=8",
    ),
    (
        CRITIC_TRAIN,
        "id beyond the vocabulary",
        {"tokens": _int(64, 8)},
        "tokens: got 64, allowed: 0 to 63",
    ),
    (
        CRITIC_TRAIN,
        "negative number",
        {"sequence_number": np.array([-1])},
        "sequence_number: got -1, allowed: 0 or greater",
    ),
    (
        REWARD_MODEL,
        "prompt beyond the sequence",
        {"prompt_lengths": _int(9)},
        "prompt_lengths: got [9, 9, 9], allowed: 0 to",
    ),
    (REWARD_MODEL, "no lengths", {"sequence_lengths": None}, "missing tensor sequence_lengths"),
    (
        REWARD_MODEL,
        "nothing to score",
        {"tokens": None, "sequence_lengths": None, "prompt_lengths": _int(1)},
        "exactly one",
    ),
    (
        REWARD_MODEL,
        "two sources",
        {"sentences": np.full((3, 1), b"a", dtype=object)},
        "allowed: exactly one",
    ),
    (
        REWARD_MODEL,
        "not valid UTF-8",
        {
            "tokens": None,
            "sequence_lengths": None,
            "sentences": np.full((1, 1), b"\xff", dtype=object),
        },
        "sentences: got bytes that are not valid UTF-8",
    ),
]

# Requests that Triton refuses before they reach our code. The error has Triton's text on the wire,
# and our text in the unit test.
REFUSED_BY_TRITON: list[tuple[EndpointSpec, str, dict[str, NDArray | None], str]] = [
    (
        CRITIC_INFER,
        "float ids",
        {"tokens": _float(1, 8)},
        "tokens: got dtype float32, allowed: int64",
    ),
    (
        CRITIC_INFER,
        "rank",
        {"sequence_lengths": np.full((3, 1, 1), 8)},
        "sequence_lengths: got shape [3, 1, 1], allowed: [B, 1]",
    ),
    (
        CRITIC_INFER,
        "missing tensor",
        {"sequence_lengths": None},
        "missing tensor sequence_lengths; got: tokens",
    ),
    (
        CRITIC_INFER,
        "unknown tensor",
        {"token": _int(1, 8)},
        "unknown tensor token; allowed: tokens, sequence_lengths",
    ),
    (
        CRITIC_INFER,
        "no rows",
        {"tokens": _int(5, 8, 0), "sequence_lengths": _int(8, 1, 0)},
        "the batch is empty: got B=0",
    ),
    (
        CRITIC_TRAIN,
        "no rows",
        {name: array[:0] for name, array in good(CRITIC_TRAIN).items()},
        "the batch is empty: got B=0, allowed: at least 1",
    ),
    (
        CRITIC_TRAIN,
        "wide floats",
        {"mask": np.ones((3, 7))},
        "mask: got dtype float64, allowed: float32",
    ),
    (
        CRITIC_TRAIN,
        "missing tensor",
        {"returns": None},
        "missing tensor returns; got: mask, prev_values, tokens",
    ),
    (
        CRITIC_TRAIN,
        "number as text",
        {"sequence_number": np.array([b"1"])},
        "sequence_number: got dtype |S1, allowed: int64",
    ),
]


def spoil(endpoint: EndpointSpec, changes: dict[str, NDArray | None]) -> dict[str, NDArray]:
    """Return a good request with replaced tensors; None removes a tensor."""
    return {
        name: array for name, array in {**good(endpoint), **changes}.items() if array is not None
    }
