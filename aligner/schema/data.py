"""What a run learns from."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section


@dataclass
class CurriculumConfig:
    """Which prompts are drawn again, by their pass rates in the run: the share of their samples
    that passed."""

    between: list[float] = option(
        [],
        "[LOW, HIGH]: a prompt of a lower or higher pass rate rests; []: none does. [0.01, 0.99]:"
        " never or always right",
    )
    rest_passes: int = option(
        1,
        "so many passes over its source a prompt that rests is not drawn; then it is tried again."
        " 0: it is left out for good",
        minimum=0,
        read=".between!=[]",
    )
    target: float | None = option(
        None,
        "the further a prompt's pass rate is from this, the less often it is drawn: with 0.5 by"
        " 4p(1-p); null: no matter",
        above=0,
        below=1,
    )
    least_chance: float = option(
        0.1,
        "of a prompt to be drawn, whatever its pass rate",
        above=0,
        maximum=1,
        read=".target!=null",
    )
    memory: float = option(
        1.0,
        "what a prompt's earlier samples count once it is drawn again. 1: all of the run's samples"
        " count alike; 0: those of its last draw alone",
        minimum=0,
        maximum=1,
    )

    @property
    def chooses(self) -> bool:
        """Whether any prompt is passed over."""
        return bool(self.between) or self.target is not None


@dataclass
class DataConfig:
    """What is learned from: prompts (trainer=online), demonstrations (sft), preferences (dpo,
    reward_model) or steps."""

    path: str | None = option(
        None,
        "a .jsonl file, a directory that Hugging Face datasets saved, for prompts a .txt file with"
        " one a line, or function:MODULE:CALLABLE, a Python function that yields records",
    )
    sources: dict[str, Any] = option(
        {}, "name to path, weight and fields: several sources instead of data.path, mixed by weight"
    )
    function_timeout_s: float = option(
        3600.0,
        "deadline of a Python function that yields records, which has a process of its own",
        minimum=0.1,
    )
    tasks: list[Any] = option(
        [],
        "tasks of reasoning_gym instead of data.path, mixed by weight: each a name, or {name,"
        " weight, questions, seed, difficulty, config, fields}",
    )
    task_prompt: str = option(
        "{question}", "what the prompt of a task's question is", read=".tasks!=[]"
    )
    task_messages: bool = option(
        False,
        "it is a message of the user's, worded by the model's chat template, not a plain text",
        read=".tasks!=[]",
    )
    prompts: list[str] = option(
        [],
        "prompts given in place, instead of a file",
        read=".path=null and .sources={} and .tasks=[]",
    )
    fields: dict[str, Any] = option(
        {},
        "our name of a record's field to the data's own, such as {prompt: question}, or to a text"
        " with fields of the data in braces, such as {prompt: 'Q: {question}'}; for sources that"
        " have no fields",
        read=".path!=null or .sources!={} or .tasks!=[]",
    )
    skip_bad_records: bool = option(
        False, "leave out records that are not as they must be, and say how many"
    )
    prompt_after: str | None = option(
        None,
        "a prompt begins behind the first occurrence of this text; null: at its beginning",
    )
    prompt_before: str | None = option(
        None,
        "a prompt ends before the last occurrence of this text; null: at its end",
    )
    max_prompt_tokens: int = option(
        64,
        "longest prompt, special tokens that the tokenizer begins it with included; of longer ones:"
        " data.long_prompts",
        minimum=1,
    )
    long_prompts: str = option(
        "error",
        "what becomes of a longer prompt. error: it is a bad record; drop: its record is left out;"
        " cut_start, cut_end: it loses its start, or its end, which chat messages never do: longer"
        " ones are bad",
        choices=("error", "drop", "cut_start", "cut_end"),
    )
    max_response_tokens: int = option(
        64,
        "a longer response, its end-of-sequence token included, is an error",
        minimum=2,
        read="algorithm.trainer=sft|dpo|reward_model|teacher_scores",
    )
    end_of_sequence: bool = option(
        True,
        "an end-of-sequence token is put behind each response; false for a reward model that scores"
        " responses which generation cuts",
        read="algorithm.trainer=sft|dpo|reward_model|teacher_scores",
    )
    margin: bool = option(
        True,
        "a pair's chosen response is to be ahead by its record's margin; false: records' margins"
        " are not read",
        read=(
            "algorithm.trainer=reward_model or algorithm.trainer=dpo and"
            " algorithm.preference.kind=rpo_fwd_kl|rpo_bwd_kl|rpo_sq"
        ),
    )
    learned_turns: str = option(
        "last",
        "of a conversation's answers the last one is learned from, the others are part of its"
        " prompt; all: every one is, its end of turn included",
        choices=("last", "all"),
        read="algorithm.trainer=sft|teacher_scores",
    )
    drawn_tokens: bool = option(
        True,
        "a response of a record that says which tokens it was drawn as is these tokens, no end"
        " added; false: its text is tokenized, as that of another model's responses must be",
        read=(
            "algorithm.trainer=sft|dpo|reward_model|teacher_scores or algorithm.trainer=online and"
            " evaluation.every>0"
        ),
    )
    shuffle: bool = option(True, "a new order of each source's records in every pass")
    sort_by: str | None = option(
        None,
        "a field of the records, a number: each source's records lie in its order, least first;"
        " -FIELD: greatest first, as -pass_rate from easy to hard",
        read="algorithm.trainer=online|preferences",
    )
    pass_rate: list[float] = option(
        [],
        "[LOW, HIGH]: records whose field `pass_rate`, 0 to 1, is outside are left out",
        read="algorithm.trainer=online|preferences",
    )
    pass_rate_samples: str | None = option(
        None,
        "samples of the prompts with scores, as aligner evaluate writes into --output: `pass_rate`"
        " is the share of a prompt's that pass",
        read="algorithm.trainer=online|preferences",
    )
    pass_threshold: float | None = option(
        1.0,
        "a sample passes with this score or above, as the reward gives it; null: its score, cut to"
        " 0..1, is how far it passes",
        read="algorithm.trainer=online or .pass_rate_samples!=null",
    )
    curriculum: CurriculumConfig = section(CurriculumConfig, read="algorithm.trainer=online")
    batch_size: int = option(
        32, "rows of a training step", minimum=1, read="algorithm.trainer=sft|dpo|reward_model"
    )
    held_out: int = option(
        0,
        "so many rows of each source are evaluated on and never trained on: drawn by the seed;"
        " shuffle=false: the last ones",
        minimum=0,
        read="algorithm.trainer=sft|dpo|reward_model",
    )
    normalization: str | None = option(
        None,
        "samples of the initial policy, with a prompt and a response each, that a reward model's"
        " rewards are normalized by; the preferences' own answers when null",
        read="algorithm.trainer=reward_model",
    )
    normalization_samples: int = option(
        256, "the first so many of these", minimum=2, read="algorithm.trainer=reward_model"
    )
