"""What scores the samples."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.judge_questions import ASKINGS
from aligner.schema.options import option, section
from aligner.schema.server import PortsConfig
from aligner.schema.trained_model import MegatronModelConfig

OWN_SERVER = (
    "critic.with_reward=false or algorithm.with_critic=false or algorithm.advantage!=gae|*:* or"
    " algorithm.trainer=preferences"
)
"""When the reward has a server of its own: where no critic serves it."""
_JUDGE = ".kind=judge"


@dataclass
class RewardConfig(MegatronModelConfig):
    """What scores the samples; the Megatron keys speak of a reward model (kind=model). Several
    sources are `sources`."""

    kind: str = option(
        "function",
        "function: a Python function; model: a Megatron reward model; remote: an HTTP scorer;"
        " judge: a language model behind an OpenAI-compatible endpoint; combined: several"
        " `sources`",
        choices=("function", "model", "remote", "judge", "combined"),
    )
    function: str = option(
        "digit_fraction", "a built-in scorer's name, or module:callable", read=".kind=function"
    )
    function_timeout_s: float = option(
        240.0,
        "deadline of a call of a function of the user's own, which has a process of its own; below"
        " server.request_timeout_s, so that it is told by name",
        minimum=0.1,
        read=".kind=function",
    )
    step_rewards: bool = option(
        False,
        "the function gives each response a list of (end, reward) instead of a number: of steps"
        " that end behind so many of its characters; the score is their sum",
        read=".kind=function",
    )
    path: str | None = option(None, "reward model directory", read=".kind=model")
    step_separator: str | None = option(
        None,
        "a process reward model, read wherever this text ends, as a full stop, and at the"
        " response's end; the score is the sum over the steps. null: read at the end alone",
        read=".kind=model",
    )
    step_probability: bool = option(
        True,
        "the reward of a step is the probability that it is right, of the model's number as a"
        " logit; false: the number itself",
        read=".kind=model and .step_separator!=null",
    )
    config: dict[str, Any] = option(
        {},
        "its config.json as YAML, which `aligner validate` goes by while there is no such"
        " directory; what it does not say is as in model.config, all of it when empty",
        read=".kind=model",
    )
    url: str | None = option(
        None,
        "address that takes queries and answers rewards, as OpenRLHF's remote_rm_url",
        read=".kind=remote",
    )
    timeout_s: float = option(
        60.0,
        "deadline of a request to the remote scorer, retries included",
        minimum=0.1,
        read=".kind=remote",
    )
    skip_special_tokens: bool = option(
        False,
        "leave special tokens out of the texts that the remote scorer gets; a chat reward model"
        " needs them, to tell the turns",
        read=".kind=remote",
    )
    judge_url: str | None = option(
        None,
        "base address of the judge's endpoint, as OpenAI clients have it: http://HOST:PORT/v1",
        read=_JUDGE,
    )
    judge_model: str | None = option(None, "the judge's name at the endpoint", read=_JUDGE)
    judge_asks: str = option(
        "score",
        "score: a number for each response; yes_no: the probability of yes, by log-probs; pairwise:"
        " which of two samples of a prompt is better, of every two in both orders; ranking: the"
        " order of all samples of a prompt",
        choices=tuple(ASKINGS),
        read=_JUDGE,
    )
    judge_template: str | None = option(
        None,
        "the question, with fields in braces: {prompt}, {response} ({response_a} and {response_b},"
        " or {responses}) and any of the record's; a plain one when null",
        read=_JUDGE,
    )
    judge_pattern: str = option(
        r"SCORE:\s*(-?\d+(?:\.\d+)?)",
        "regular expression whose last match in the judge's answer has the score as its first group"
        " (judge_asks=score)",
        read=_JUDGE,
    )
    judge_lowest: float = option(
        0.0, "lowest score; an answer with a lower one cannot be read", read=_JUDGE
    )
    judge_highest: float = option(10.0, "highest score", read=_JUDGE)
    judge_temperature: float = option(
        0.0, "temperature that the judge answers at", minimum=0, read=_JUDGE
    )
    judge_max_tokens: int = option(
        512, "longest answer; with judge_asks=yes_no it is one token", minimum=1, read=_JUDGE
    )
    judge_tries: int = option(
        3,
        "a question is asked so often, at most, until its answer can be read; then its prompt is"
        " refused",
        minimum=1,
        read=_JUDGE,
    )
    judge_timeout_s: float = option(
        60.0,
        "deadline of an answer, retries over HTTP included, each time that it is asked for",
        minimum=0.1,
        read=_JUDGE,
    )
    judge_concurrency: int = option(
        8, "questions under way at a time, of each replica", minimum=1, read=_JUDGE
    )
    judge_requests_per_minute: float | None = option(
        None,
        "requests that are sent at most, of each replica; as many as there are when null",
        above=0,
        read=_JUDGE,
    )
    judge_key_variable: str | None = option(
        None,
        "environment variable with the endpoint's key, which is sent as a bearer token; no key when"
        " null",
        read=_JUDGE,
    )
    judge_input_price: float = option(
        0.0, "price of a million tokens of questions, for judge/cost", minimum=0, read=_JUDGE
    )
    judge_output_price: float = option(
        0.0, "price of a million tokens of answers", minimum=0, read=_JUDGE
    )
    judge_cache: str | None = option(
        None,
        "directory of the answers that are known, which several runs may share; judge/ in the run"
        " directory when null",
        read=_JUDGE,
    )
    gain: float = option(
        1.0,
        "scores are multiplied by it: normalization to a mean and deviation is gain and bias",
        read=".kind!=combined",
    )
    bias: float = option(0.0, "and this is added", read=".kind!=combined")
    sources: dict[str, Any] = option(
        {},
        "name to kind, weight, task_weights, gain, bias and function and function_timeout_s, path,"
        " url, timeout_s and skip_special_tokens, the step_… keys, or the judge_… keys",
        read=".kind=combined",
    )
    combine: str = option(
        "sum",
        "what the score is of the sources' scores, each times its weight: their sum or, of an"
        " ensemble, mean, min, or the mean less disagreement_weight times their standard deviation"
        " or variance (over all sources, not a sample of them)",
        choices=("sum", "mean", "min", "mean_minus_std", "mean_minus_variance"),
        read=".kind=combined",
    )
    disagreement_weight: float = option(
        0.5,
        "weight of what the sources disagree by",
        minimum=0,
        read=".combine=mean_minus_std|mean_minus_variance",
    )
    missing_end_score: float | None = option(
        None,
        "score of a response without an end, an end-of-sequence token or rollout.truncate_token;"
        " its own when null",
    )
    replicas: int = option(
        1,
        "servers with the same scorer; a request goes to the one with the fewest under way",
        minimum=1,
        read=OWN_SERVER,
    )
    ports: PortsConfig = section(PortsConfig, read=OWN_SERVER)
