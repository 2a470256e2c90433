"""Keys of the training records: section `data`."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section

MAX_SEED = 2**10 - 1
"""Largest seed of a task of reasoning_gym."""
MAX_QUESTIONS = 2**16
"""Maximum number of questions of a task of reasoning_gym."""
TASK = "task"
"""Record field with the name of the task; reward weights and teachers can depend on it."""
AUTO_LAYOUT = "auto"
"""Value of `data.format`: the layout of each record is recognised by its fields."""
NO_LAYOUT = "none"
"""Value of `data.format`: the records are not converted."""
LAYOUT_NAMES = (
    "sharegpt",
    "nemo_aligner",
    "nemo_aligner_pairs",
    "hh_rlhf",
    "hh_rlhf_text",
    "ultrafeedback",
    "trl_completion",
    "openrlhf",
    "slime",
    "verl",
    "alpaca",
)
"""Other values of `data.format`: published layouts, see `aligner.data.record_layouts`."""
LAYOUT_CHOICES = (AUTO_LAYOUT, NO_LAYOUT, *LAYOUT_NAMES)
"""All values of `data.format`."""


@dataclass
class CurriculumConfig:
    """Curriculum: the sampling frequency of a prompt depends on its pass rate in this run (the
    fraction of the prompt's samples that passed)."""

    between: list[float] = option(
        [],
        "Range `[LOW, HIGH]` of pass rates. A prompt with a pass rate outside the range is"
        " paused for `data.curriculum.rest_passes`. `[0.01, 0.99]` pauses prompts that never or"
        " always pass; `[]` pauses no prompts.",
    )
    rest_passes: int = option(
        1,
        "Number of epochs (of the prompt's source) for which a paused prompt is skipped; after"
        " that, the prompt is sampled again. 0 means that paused prompts are never sampled"
        " again.",
        minimum=0,
        read_if=".between!=[]",
    )
    target: float | None = option(
        None,
        "Pass rate at which prompts are always sampled. The sampling probability of a prompt"
        " decreases with the distance of its pass rate p from the target; for a target of 0.5,"
        " the probability is 4p(1-p). Null means that the pass rate has no influence.",
        above=0,
        below=1,
    )
    min_probability: float = option(
        0.1,
        "Minimum sampling probability of a prompt, regardless of its pass rate.",
        above=0,
        maximum=1,
        read_if=".target!=null",
    )
    decay: float = option(
        1.0,
        "Decay factor for the weight of earlier samples in a prompt's pass rate, applied each"
        " time the prompt is sampled again. 1: all samples of the run count equally; 0: only the"
        " latest samples count.",
        minimum=0,
        maximum=1,
    )

    @property
    def selects_prompts(self) -> bool:
        """Whether the curriculum may skip prompts."""
        return bool(self.between) or self.target is not None


@dataclass
class DataConfig:
    """Training records: prompts (`algorithm.trainer=online` or `preferences`), demonstrations
    (`sft`, `teacher_scores`), preferences (`dpo`, `reward_model`) or labeled steps
    (`reward_model`)."""

    path: str | None = option(
        None,
        "Source of the records: a `.jsonl`, `.json`, `.csv` or `.parquet` file (`.jsonl` and"
        " `.json` also compressed, as `.gz`), a directory saved by"
        " Hugging Face `datasets`, the name of a data set on the Hugging Face Hub"
        " (`OWNER/NAME:CONFIG:SPLIT`), a `.txt` file with one prompt per line,"
        " `experiment:NAME/FILE`, or `function:MODULE:CALLABLE` for a Python function that yields"
        " records.",
    )
    sources: dict[str, Any] = option(
        {},
        "Several data sources, mixed by weight, instead of `data.path`: a mapping from the name"
        " of each source to its `path`, `weight` and `fields`.",
    )
    function_timeout_s: float = option(
        3600.0,
        "Timeout in seconds for a Python function to yield all its records; the function runs"
        " in a separate process.",
        minimum=0.1,
    )
    tasks: list[Any] = option(
        [],
        "Tasks of reasoning_gym, mixed by weight, instead of `data.path`. Each task is a name,"
        " or a mapping with `name`, `weight`, `questions`, `seed`, `difficulty`, `config` and"
        " `fields`.",
    )
    task_prompt: str = option(
        "{question}",
        "Prompt template for the questions of reasoning_gym; must contain `{question}`.",
        read_if=".tasks!=[]",
    )
    task_messages: bool = option(
        False,
        "Whether the prompt of a task is a user message, rendered with the model's chat"
        " template; false means plain text.",
        read_if=".tasks!=[]",
    )
    prompts: list[str] = option(
        [],
        "List of prompts, used instead of `data.path`.",
        read_if=".path=null and .sources={} and .tasks=[]",
    )
    fields: dict[str, Any] = option(
        {},
        "Mapping from aligner's field names to field names of the data, such as `{prompt:"
        " question}`, or to templates, such as `{prompt: 'Q: {question}'}`. Applies to each"
        " source without its own `fields`.",
        read_if=".path!=null or .sources!={} or .tasks!=[]",
    )
    format: str = option(
        AUTO_LAYOUT,
        "Layout of the records. `auto`: each record's layout is recognised by its fields;"
        " `none`: the records are not converted. The others are published layouts, to which every"
        " record must then conform.",
        choices=LAYOUT_CHOICES,
        read_if=".path!=null or .sources!={} or .tasks!=[]",
    )
    sanitize: bool = option(
        True,
        "Whether control tokens of the model, such as `</s>`, in the text of user, system and"
        " tool messages are encoded as plain characters. False encodes them as control tokens"
        " and logs a warning. Prompts that are plain text are not affected.",
    )
    chat_template_kwargs: dict[str, Any] = option(
        {},
        "Variables of the chat template, for example `{enable_thinking: false}`. The field"
        " `chat_template_kwargs` of a record, or of a request to an endpoint, takes precedence.",
    )
    skip_bad_records: bool = option(
        False,
        "Whether to skip invalid records and report their number. With false, the first invalid"
        " record is an error.",
    )
    prompt_after: str | None = option(
        None,
        "Marker before the prompt: the prompt starts after the first occurrence of this marker"
        " in the text. Null means the start of the text.",
    )
    prompt_before: str | None = option(
        None,
        "Marker after the prompt: the prompt ends before the last occurrence of this marker in"
        " the text. Null means the end of the text.",
    )
    max_prompt_tokens: int = option(
        64,
        "Maximum prompt length in tokens, including special tokens that the tokenizer prepends."
        " `data.long_prompts` defines the handling of longer prompts.",
        minimum=1,
    )
    long_prompts: str = option(
        "error",
        "Handling of prompts longer than `data.max_prompt_tokens`. `error`: the record is"
        " invalid; `drop`: the record is skipped; `cut_start`: the start of the prompt is cut"
        " off; `cut_end`: the end of the prompt is cut off. `cut_start` and `cut_end` do not cut"
        " chat messages: a record with longer chat messages is invalid.",
        choices=("error", "drop", "cut_start", "cut_end"),
    )
    max_response_tokens: int = option(
        64,
        "Maximum response length in tokens, including the end-of-sequence token. A longer"
        " response makes the record invalid.",
        minimum=2,
        read_if="algorithm.trainer=sft|dpo|reward_model|teacher_scores",
    )
    end_of_sequence: bool = option(
        True,
        "Whether to append an end-of-sequence token to each response. Set false for a reward"
        " model that scores responses truncated at the maximum length.",
        read_if="algorithm.trainer=sft|dpo|reward_model|teacher_scores",
    )
    margin: bool = option(
        True,
        "Whether to use the field `margin` of each record, which is the intended score"
        " difference between the chosen and the rejected response. False ignores the field.",
        read_if=(
            "algorithm.trainer=reward_model or algorithm.trainer=dpo and"
            " algorithm.preference.kind=rpo_fwd_kl|rpo_bwd_kl|rpo_sq"
        ),
    )
    learned_turns: str = option(
        "last",
        "Assistant turns of a conversation that are trained on. `last`: only the last turn,"
        " with earlier turns as part of the prompt; `all`: every assistant turn, including its"
        " end-of-turn token.",
        choices=("last", "all"),
        read_if="algorithm.trainer=sft|teacher_scores",
    )
    generated_tokens: bool = option(
        True,
        "Whether to use the generated token ids that are stored with a response, without"
        " appending an end-of-sequence token. False tokenizes the text of the response instead;"
        " set false if a model with another tokenizer generated the response.",
        read_if=(
            "algorithm.trainer=sft|dpo|reward_model|teacher_scores or algorithm.trainer=online and"
            " evaluation.every>0"
        ),
    )
    shuffle: bool = option(
        True, "Whether to shuffle the records of each source again in every epoch."
    )
    sort_by: str | None = option(
        None,
        "Numeric record field by which each source is sorted in ascending order. `-FIELD` sorts"
        " in descending order: `-pass_rate` sorts from easy to hard. Requires"
        " `data.shuffle=false`.",
        read_if="algorithm.trainer=online|preferences",
    )
    pass_rate: list[float] = option(
        [],
        "Range `[LOW, HIGH]` of the record field `pass_rate` (0 to 1); records with a value"
        " outside the range are skipped. `[]` means no filter.",
        read_if="algorithm.trainer=online|preferences",
    )
    pass_rate_samples: str | None = option(
        None,
        "File of scored samples of the prompts, written by `aligner evaluate --output`. The"
        " `pass_rate` of a prompt is computed from this file as the fraction of the prompt's"
        " samples that pass.",
        read_if="algorithm.trainer=online|preferences",
    )
    pass_threshold: float | None = option(
        1.0,
        "Minimum reward score of a sample that passes. Null means that the pass rate of a"
        " prompt is the mean of its scores, each clipped to the range 0 to 1.",
        read_if="algorithm.trainer=online or .pass_rate_samples!=null",
    )
    curriculum: CurriculumConfig = section(CurriculumConfig, read_if="algorithm.trainer=online")
    batch_size: int = option(
        32,
        "Number of records per training step.",
        minimum=1,
        read_if="algorithm.trainer=sft|dpo|reward_model",
    )
    held_out: int = option(
        0,
        "Number of records of each source that are held out for evaluation and never trained"
        " on. The records are selected at random by `seed`; with `data.shuffle=false`, the last"
        " records are held out.",
        minimum=0,
        read_if="algorithm.trainer=sft|dpo|reward_model",
    )
    normalization: str | None = option(
        None,
        "File of samples of the initial policy, each with a prompt and a response. The scores"
        " of the reward model are normalized on these samples. Null means the responses of the"
        " preference pairs.",
        read_if="algorithm.trainer=reward_model",
    )
    normalization_samples: int = option(
        256,
        "Number of samples that are used for normalization, starting with the first sample.",
        minimum=2,
        read_if="algorithm.trainer=reward_model",
    )
