"""Keys of the sources that score the samples: section `reward`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.judge_questions import JUDGE_QUESTIONS
from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import MegatronModelConfig

HAS_REWARD_SERVER = (
    "critic.with_reward=false or algorithm.with_critic=false or algorithm.advantage!=gae|*:* or"
    " algorithm.trainer=preferences"
)
"""Condition of a run in which the reward has its own server, because the critic does not serve
it."""
_HAS_JUDGE = ".kind=judge"


@dataclass
class RewardConfig(MegatronModelConfig):
    """Scoring of samples. Keys that other models have too (`parallel`, `precision` and so on)
    apply only to reward models."""

    kind: str = option(
        "function",
        "Kind of scorer. `function`: a Python function; `model`: a reward model in Megatron;"
        " `remote`: an HTTP scorer; `judge`: an LLM judge behind an OpenAI-compatible endpoint;"
        " `combined`: several scorers of these kinds, defined in `reward.sources`.",
        choices=("function", "model", "remote", "judge", "combined"),
    )
    function: str = option(
        "digit_fraction",
        "Name of a built-in scoring function, or `module:callable` for your own function.",
        read_if=".kind=function",
    )
    function_timeout_s: float = option(
        240.0,
        "Timeout in seconds of one call of your own function, which runs in a separate process."
        " Set a value below `server.request_timeout_s`, so that the error names the function.",
        minimum=0.1,
        read_if=".kind=function",
    )
    step_rewards: bool = option(
        False,
        "Whether the function returns step rewards instead of one number: for each response, a"
        " list of `(end, reward)` pairs, where `end` is the character position at which the step"
        " ends. The score of the response is the sum of its step rewards.",
        read_if=".kind=function",
    )
    path: str | None = option(
        None,
        "Reward model: model directory, name on the Hugging Face Hub, or `experiment:NAME`.",
        read_if=".kind=model",
    )
    step_separator: str | None = option(
        None,
        "Text at the end of a step, such as a full stop. A process reward model scores each"
        " step after this text, and the last step at the end of the response; the score of the"
        " response is the sum. Null means one score at the end of the response.",
        read_if=".kind=model",
    )
    step_probability: bool = option(
        True,
        "Whether the reward of a step is the sigmoid of the model's output (the probability"
        " that the step is correct). False means the output itself.",
        read_if=".kind=model and .step_separator!=null",
    )
    config: dict[str, Any] = option(
        {},
        "Contents of the reward model's `config.json`, which `aligner validate` uses if the"
        " model directory does not exist. Missing entries default to `model.config`.",
        read_if=".kind=model",
    )
    url: str | None = option(
        None,
        "URL of a remote scorer with the interface of OpenRLHF's `remote_rm_url`.",
        read_if=".kind=remote",
    )
    timeout_s: float = option(
        60.0,
        "Timeout in seconds of a request to the remote scorer, including retries.",
        minimum=0.1,
        read_if=".kind=remote",
    )
    skip_special_tokens: bool = option(
        False,
        "Whether to remove special tokens from the texts that are sent to the remote scorer."
        " Set false for a chat reward model, which needs special tokens to separate turns.",
        read_if=".kind=remote",
    )
    judge_url: str | None = option(
        None,
        "Base URL of the judge's OpenAI-compatible endpoint, `http://HOST:PORT/v1`.",
        read_if=_HAS_JUDGE,
    )
    judge_model: str | None = option(
        None, "Model name of the judge at the endpoint.", read_if=_HAS_JUDGE
    )
    judge_asks: str = option(
        "score",
        "Type of judge request. `score`: a number for each response; `yes_no`: the probability"
        ' of "yes" for each response, from log-probs; `pairwise`: the better response of every'
        " two samples of a prompt, in both orders; `ranking`: the order of all samples of a"
        " prompt.",
        choices=tuple(JUDGE_QUESTIONS),
        read_if=_HAS_JUDGE,
    )
    judge_template: str | None = option(
        None,
        "Template of the judge's prompt. The fields are `{prompt}`, any record field, and"
        " `{response}` (with `pairwise`: `{response_a}` and `{response_b}`; with `ranking`:"
        " `{responses}`). Null means a built-in template.",
        read_if=_HAS_JUDGE,
    )
    judge_pattern: str = option(
        r"SCORE:\s*(-?\d+(?:\.\d+)?)",
        "Regular expression that extracts the score from the judge's answer with"
        " `reward.judge_asks=score`: the score is the first group of the last match.",
        read_if=_HAS_JUDGE,
    )
    judge_lowest: float = option(
        0.0,
        "Lowest valid score. A judge's answer with a lower score is invalid.",
        read_if=_HAS_JUDGE,
    )
    judge_highest: float = option(
        10.0,
        "Highest valid score. A judge's answer with a higher score is invalid.",
        read_if=_HAS_JUDGE,
    )
    judge_temperature: float = option(
        0.0, "Sampling temperature of the judge.", minimum=0, read_if=_HAS_JUDGE
    )
    judge_max_tokens: int = option(
        512,
        "Maximum length of the judge's answer in tokens; always 1 with `reward.judge_asks=yes_no`.",
        minimum=1,
        read_if=_HAS_JUDGE,
    )
    judge_tries: int = option(
        3,
        "Maximum number of attempts to get a valid answer from the judge. If all attempts fail,"
        " scoring of the prompt fails (see `rollout.max_skipped_prompts`); `evaluation.judge`"
        " excludes the comparison.",
        minimum=1,
        read_if=_HAS_JUDGE,
    )
    judge_timeout_s: float = option(
        60.0,
        "Timeout in seconds of each judge request, including HTTP retries.",
        minimum=0.1,
        read_if=_HAS_JUDGE,
    )
    judge_concurrency: int = option(
        8,
        "Maximum number of judge requests in flight per reward replica.",
        minimum=1,
        read_if=_HAS_JUDGE,
    )
    judge_requests_per_minute: float | None = option(
        None,
        "Maximum number of judge requests per minute and per reward replica; null means no"
        " maximum.",
        above=0,
        read_if=_HAS_JUDGE,
    )
    judge_key_variable: str | None = option(
        None,
        "Environment variable that contains the endpoint's API key, which is sent as a bearer"
        " token; null means no key.",
        read_if=_HAS_JUDGE,
    )
    judge_input_price: float = option(
        0.0,
        "Price per million prompt tokens of the judge, for the metric `judge/cost`.",
        minimum=0,
        read_if=_HAS_JUDGE,
    )
    judge_output_price: float = option(
        0.0,
        "Price per million generated tokens of the judge, for the metric `judge/cost`.",
        minimum=0,
        read_if=_HAS_JUDGE,
    )
    judge_cache: str | None = option(
        None,
        "Directory for cached judge answers, which several runs may share; null means `judge/`"
        " in the run directory.",
        read_if=_HAS_JUDGE,
    )
    gain: float = option(
        1.0,
        "Factor by which raw scores are multiplied. Use `reward.gain` and `reward.bias` to"
        " normalize the scores to a mean and standard deviation.",
        read_if=".kind!=combined",
    )
    bias: float = option(
        0.0,
        "Constant that is added to raw scores after multiplication by `reward.gain`.",
        read_if=".kind!=combined",
    )
    sources: dict[str, Any] = option(
        {},
        "Mapping from the name of each source to `kind`, `weight`, `task_weights`, `gain`,"
        " `bias` and the keys for this kind: `function`, `function_timeout_s`, `path`, `url`,"
        " `timeout_s`, `skip_special_tokens`, `step_…` or `judge_…`.",
        read_if=".kind=combined",
    )
    combine: str = option(
        "sum",
        "Combination of the weighted scores of all sources. `sum`; `mean`; `min`;"
        " `mean_minus_std`: mean minus `reward.disagreement_weight` times the population"
        " standard deviation of the scores; `mean_minus_variance`: mean minus"
        " `reward.disagreement_weight` times the population variance of the scores.",
        choices=("sum", "mean", "min", "mean_minus_std", "mean_minus_variance"),
        read_if=".kind=combined",
    )
    disagreement_weight: float = option(
        0.5,
        "Weight of the standard deviation or variance of the sources' scores.",
        minimum=0,
        read_if=".combine=mean_minus_std|mean_minus_variance",
    )
    missing_end_score: float | None = option(
        None,
        "Score of a truncated response, which has no end-of-sequence token or"
        " `rollout.truncate_token`; null means that the response keeps its own score.",
    )
    replicas: int = option(
        1,
        "Number of servers with the same scorer. Each request is sent to the server with the"
        " fewest requests in flight.",
        minimum=1,
        read_if=HAS_REWARD_SERVER,
    )
    ports: PortsConfig = section(PortsConfig, read_if=HAS_REWARD_SERVER)
