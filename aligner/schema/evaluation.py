"""Keys of evaluations during training: section `evaluation`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.data import AUTO_LAYOUT, LAYOUT_CHOICES
from aligner.schema.options import option


@dataclass
class EvaluationConfig:
    """Evaluation during training. All keys but `every` apply to `algorithm.trainer=online`;
    offline trainers evaluate on `data.held_out`."""

    every: int = option(
        0,
        "Number of steps between evaluations. With `algorithm.trainer=online`, evaluations also"
        " run before the first step and after the last step; 0 means no evaluations. With"
        " offline trainers, evaluations also run at each step-based checkpoint; 0 means"
        " evaluations only at these checkpoints.",
        minimum=0,
    )
    asynchronous: bool = option(
        False,
        "Whether evaluations run asynchronously, concurrently with the next training step."
        " Requires asynchronous rollouts (`rollout.max_staleness` above 0).",
        read_if=".every!=0",
    )
    path: str | None = option(
        None,
        "File or directory of held-out prompts, as for `data.path`. The record field"
        " `reference` is a reference response, with which the policy's response is compared.",
    )
    fields: dict[str, Any] = option(
        {},
        "Mapping from aligner's field names to field names of the evaluation data, as"
        " `data.fields`.",
        read_if=".path!=null",
    )
    format: str = option(
        AUTO_LAYOUT,
        "Layout of the evaluation records, as `data.format`.",
        choices=LAYOUT_CHOICES,
        read_if=".path!=null",
    )
    template: str = option(
        "auto",
        "Use of the chat template. `auto`: only for chat messages; `chat`: also for plain texts, as"
        " the message of a user; `raw`: for no prompt, and a prompt of one message becomes its"
        " text.",
        choices=("auto", "chat", "raw"),
    )
    prompts: list[str] = option([], "List of held-out prompts, used instead of `evaluation.path`.")
    questions: int = option(
        0,
        "Number of held-out questions of each task in `data.tasks`, used instead of"
        " `evaluation.path`.",
        minimum=0,
        read_if="data.tasks!=[]",
    )
    group_by: str | None = option(
        None,
        "Record field, such as `task`, for grouped results: scores and pass rates are also"
        " reported for each value of the field (`eval/score/VALUE`). Null means no groups.",
    )
    count: int | None = option(
        None,
        "Number of prompts, starting with the first prompt; null means all prompts.",
        minimum=1,
    )
    samples: int = option(1, "Number of responses sampled per prompt.", minimum=1)
    greedy: bool | None = option(
        None,
        "Whether to use greedy decoding; null means greedy decoding with `evaluation.samples=1`"
        " only.",
    )
    temperature: float = option(
        1.0,
        "Sampling temperature.",
        minimum=1e-3,
        # Suites inherit the temperature.
        read_if=".greedy=false or .greedy=null and .samples>1 or .suites!={}",
    )
    function: str | None = option(
        None,
        "Scoring function for the evaluation, such as a gold scorer; same values as"
        " `reward.function`. Null means the run's reward.",
    )
    function_timeout_s: float = option(
        3600.0,
        "Timeout in seconds for your own scoring function to score all responses.",
        minimum=0.1,
        read_if=".function!=null or .suites!={}",
    )
    pass_threshold: float = option(1.0, "Minimum score for a response to pass (`eval/pass@k`).")
    judge: dict[str, Any] = option(
        {},
        "Settings of an LLM judge: `judge_url`, `judge_model` and other `judge_…` keys of"
        " `reward`. The judge compares each response with the prompt's reference in both orders"
        " (`eval/judge_win_rate`). `{}` means no judge.",
    )
    suites: dict[str, Any] = option(
        {},
        "Additional evaluations, reported as `eval/NAME/…`. The value is a mapping from each"
        " name to `path` or `prompts`, and optionally other keys of this section except `every`"
        " and `asynchronous`, and `environment`: a mapping with keys of the section `environment`,"
        " which override the values of the section for the suite.",
    )
