"""Keys of the teacher, a frozen language model for distillation: section `teacher`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import MegatronModelConfig

_HAS_TEACHER_CONDITIONS = (
    "algorithm.trainer=online and teacher.path!=null",
    "algorithm.trainer=online and teacher.sources!={}",
)
HAS_TEACHER = " or ".join(_HAS_TEACHER_CONDITIONS)
"""Condition of a run with teacher servers."""
_HAS_STORED_SCORES = "algorithm.trainer=sft and teacher.scores!=null"
_IS_DISTILLED = f"{HAS_TEACHER} or {_HAS_STORED_SCORES}"


@dataclass
class TeacherConfig(MegatronModelConfig):
    """Teacher: a frozen language model with the policy's tokenizer, as a server on separate
    devices or as stored scores."""

    path: str | None = option(
        None,
        "Teacher model: model directory, name on the Hugging Face Hub, or `experiment:NAME`."
        " Null means no teacher, or the teachers in `teacher.sources`.",
        read_if="algorithm.trainer=online",
    )
    sources: dict[str, Any] = option(
        {},
        "Several teachers instead of `teacher.path`: a mapping from the name of each teacher to"
        " `path`, `weight` (relative weight among the teachers that score a sample; default 1)"
        " and `tasks` (the teacher is used for prompts whose field `task` has one of these"
        " values; default: all tasks).",
        read_if="algorithm.trainer=online",
    )
    scores: str | None = option(
        None,
        "Stored teacher scores of the demonstrations: the directory `teacher_scores` of a run"
        " with `algorithm=teacher_scores`, or `experiment:NAME`. The policy learns from these"
        " scores instead of the tokens of the demonstrations.",
        read_if="algorithm.trainer=sft",
    )
    imitation_weight: float = option(
        0.0,
        "Weight of the cross-entropy of the demonstrations, in addition to the divergence.",
        minimum=0,
        read_if=_HAS_STORED_SCORES,
    )
    loss: str = option(
        "advantage",
        "Distillation loss. `advantage`: the difference of log-probs, teacher minus policy, is"
        " added to the advantage of each generated token. The other choices are divergences in"
        " the loss, over the teacher's top-k tokens. `forward_kl`: KL(teacher ‖ policy);"
        " `reverse_kl`: KL(policy ‖ teacher); `jensen_shannon`: generalized Jensen-Shannon"
        " divergence.",
        choices=("advantage", "forward_kl", "reverse_kl", "jensen_shannon"),
        read_if=_IS_DISTILLED,
    )
    top_k: int = option(
        64,
        "Number of the teacher's most probable tokens that are used; all other tokens are"
        " combined into one further outcome. A number above the vocabulary size means all"
        " tokens.",
        minimum=1,
        read_if=" or ".join(
            (
                *(f"{each} and .loss!=advantage" for each in _HAS_TEACHER_CONDITIONS),
                "algorithm.trainer=teacher_scores",
            )
        ),
    )
    beta: float = option(
        0.5,
        "Weight of the teacher in the mixture of the Jensen-Shannon divergence. The divergence"
        " approaches the forward KL near 0 and the reverse KL near 1.",
        above=0,
        below=1,
        read_if=".loss=jensen_shannon",
    )
    weight: float = option(
        1.0,
        "Weight of the distillation term: the log-prob difference in the advantages, or the"
        " divergence in the loss.",
        above=0,
        read_if=_IS_DISTILLED,
    )
    logprob_chunk_tokens: int = option(
        1024, "Number of tokens whose logits are in memory at the same time.", minimum=1
    )
    replicas: int = option(
        1,
        "Number of servers with the same teacher. Each request is sent to the server with the"
        " fewest requests in flight.",
        minimum=1,
    )
    ports: PortsConfig = section(PortsConfig)

    @property
    def requested_top_k(self) -> int:
        """Number of most probable tokens per position whose log-probs the teacher returns; 0 means
        none."""
        return 0 if self.loss == "advantage" else self.top_k
