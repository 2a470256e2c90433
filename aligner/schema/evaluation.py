"""What a policy is evaluated on while it trains."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class EvaluationConfig:
    """Evaluation during training. All keys but `every` apply to `algorithm.trainer=online`;
    offline trainers evaluate on `data.held_out`."""

    every: int = option(
        0,
        "Steps between evaluations. `online`: also before the first and after the last step; 0"
        " means none. Offline trainers: also at each checkpoint by steps; 0 means only there.",
        minimum=0,
    )
    beside: bool = option(
        False,
        "Whether the evaluation runs asynchronously, concurrent with the next training step;"
        " requires generation ahead of training (`rollout.max_staleness`).",
        read=".every!=0",
    )
    path: str | None = option(
        None,
        "Held-out prompts, a file or directory as for `data.path`; the record field `reference`"
        " is a good response to compare with.",
    )
    fields: dict[str, Any] = option(
        {},
        "Mapping from aligner's field names to those of the file, as `data.fields`.",
        read=".path!=null",
    )
    prompts: list[str] = option([], "List of held-out prompts, instead of `evaluation.path`.")
    questions: int = option(
        0,
        "Number of held-out questions of each task in `data.tasks`, instead of `evaluation.path`.",
        minimum=0,
        read="data.tasks!=[]",
    )
    group_by: str | None = option(
        None,
        "Record field, such as `task`, by whose values scores and pass rates are also reported"
        " (`eval/score/VALUE`); null means none.",
    )
    count: int | None = option(
        None, "Number of prompts, from the first one; null means all.", minimum=1
    )
    samples: int = option(1, "Responses sampled per prompt.", minimum=1)
    greedy: bool | None = option(
        None,
        "Whether to decode greedily; null means greedily if there is one response per prompt.",
    )
    temperature: float = option(
        1.0,
        "Sampling temperature.",
        minimum=1e-3,
        # which take it from here
        read=".greedy=false or .greedy=null and .samples>1 or .suites!={}",
    )
    function: str | None = option(
        None,
        "Function that scores the responses, as `reward.function`, such as a gold scorer; null"
        " means the run's reward.",
    )
    function_timeout_s: float = option(
        3600.0,
        "Timeout in seconds of your own scoring function for all responses.",
        minimum=0.1,
        read=".function!=null or .suites!={}",
    )
    pass_threshold: float = option(
        1.0, "Score at or above which a response passes (`eval/pass@k`)."
    )
    judge: dict[str, Any] = option(
        {},
        "LLM judge that compares each response with its prompt's reference in both orders"
        " (`eval/judge_win_rate`): `judge_url`, `judge_model` and other `judge_…` keys of"
        " `reward`. `{}` means no judge.",
    )
    suites: dict[str, Any] = option(
        {},
        "Additional evaluations, reported as `eval/NAME/…`: a mapping from each name to `path`"
        " or `prompts` and to other keys of this section, except `every` and `beside`.",
    )
