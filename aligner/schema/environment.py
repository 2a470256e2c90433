"""What answers a policy between the turns of an episode."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option

_SET = ".target!=null"


@dataclass
class EnvironmentConfig:
    """What answers a policy between the turns of an episode; without one a response is all that there is."""

    target: str | None = option(None, "module:Class of the environment; null: none, every response is a single turn")
    arguments: dict[str, Any] = option({}, "keyword arguments of its class", read=_SET)
    max_turns: int = option(8, "an episode is cut after so many turns of the policy's", minimum=1, read=_SET)
    max_turn_tokens: int = option(
        64,
        "and where a turn of its has so many tokens; rollout.max_response_tokens bounds all turns and answers together",
        minimum=1,
        read=_SET,
    )
    turn_end: str | None = option(None, "text of one token that ends a turn, beside the end of sequence", read=_SET)
    workers: int = option(1, "processes that environments run in, of each rank that generates", minimum=1, read=_SET)
    episodes_per_worker: int = option(64, "episodes of a process at a time; others wait", minimum=1, read=_SET)
    deadline_s: float = option(60.0, "an answer takes so long at most", above=0, read=_SET)
    memory_mib: int | None = option(None, "address space of a process; null: as much as there is", minimum=64, read=_SET)
    retries: int = option(
        1,
        "an episode whose environment failed is taken up in a fresh one so often; then it is left out with its prompt, and"
        " counted (rollout/skipped)",
        minimum=0,
        read=_SET,
    )
    most_characters: int = option(100_000, "longest answer", minimum=1, read=_SET)
