"""What a policy is evaluated on while it trains."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option


@dataclass
class EvaluationConfig:
    """Measuring while training; all but `every` is for trainer=online, the others evaluate on
    data.held_out."""

    every: int = option(
        0,
        "evaluate every N steps. trainer=online: before the first step and after the last too; 0:"
        " never. The others: also where a checkpoint is taken; 0: only there",
        minimum=0,
    )
    beside: bool = option(
        False,
        "evaluate beside the next step, which does not wait for responses and scores before its"
        " end; with rollout.max_staleness, where the generator draws them",
        read=".every!=0",
    )
    path: str | None = option(
        None,
        "held-out prompts, in a file or directory as data.path; `reference` is a good response",
    )
    fields: dict[str, Any] = option(
        {}, "our name of a record's field to the file's own, as data.fields", read=".path!=null"
    )
    prompts: list[str] = option([], "held-out prompts given in place, instead of a file")
    questions: int = option(
        0,
        "so many held-out questions of each of data.tasks, instead of a file",
        minimum=0,
        read="data.tasks!=[]",
    )
    group_by: str | None = option(
        None,
        "a field of the records, such as task: scores and passes are told of each of its values too"
        " (eval/score/VALUE)",
    )
    count: int | None = option(None, "the first so many prompts; all when null", minimum=1)
    samples: int = option(1, "responses a prompt", minimum=1)
    greedy: bool | None = option(
        None,
        "take the most probable token instead of drawing; with one response a prompt when null",
    )
    temperature: float = option(
        1.0,
        "sampling temperature",
        minimum=1e-3,
        # which take it from here
        read=".greedy=false or .greedy=null and .samples>1 or .suites!={}",
    )
    function: str | None = option(
        None,
        "scorer of the responses, as reward.function: a gold scorer; the run's own reward when"
        " null",
    )
    function_timeout_s: float = option(
        3600.0,
        "deadline of a function of the user's own for all responses",
        minimum=0.1,
        read=".function!=null or .suites!={}",
    )
    pass_threshold: float = option(1.0, "a response passes with this score or above (eval/pass@k)")
    judge: dict[str, Any] = option(
        {},
        "a judge that compares each response with its prompt's reference, in both orders, for"
        " eval/judge_win_rate: judge_url, judge_model and the other judge_… keys of reward; none"
        " when empty",
    )
    suites: dict[str, Any] = option(
        {},
        "further evaluations by their names: path or prompts, and what else of this section, but"
        " every and beside, they have otherwise; measured as eval/NAME/…",
    )
