"""What a run learns from."""

from dataclasses import dataclass
from typing import Any

from aligner.schema.options import option, section


@dataclass
class CurriculumConfig:
    """Curriculum: how often prompts are sampled again, by their pass rate in this run (the share
    of their samples that passed)."""

    between: list[float] = option(
        [],
        "Range `[LOW, HIGH]` of pass rates; a prompt outside it is paused for"
        " `data.curriculum.rest_passes`. `[0.01, 0.99]` pauses prompts that never or always pass;"
        " `[]` pauses none.",
    )
    rest_passes: int = option(
        1,
        "Epochs of its source during which a paused prompt is skipped before it is tried again;"
        " 0 means that it is never tried again.",
        minimum=0,
        read=".between!=[]",
    )
    target: float | None = option(
        None,
        "Pass rate of the prompts that are always sampled; the farther a prompt's pass rate is"
        " from it, the lower its sampling probability (4p(1-p) for 0.5). Null means that the pass"
        " rate has no influence.",
        above=0,
        below=1,
    )
    least_chance: float = option(
        0.1,
        "Minimum sampling probability of a prompt, whatever its pass rate.",
        above=0,
        maximum=1,
        read=".target!=null",
    )
    memory: float = option(
        1.0,
        "Decay factor of a prompt's earlier samples in its pass rate each time the prompt is"
        " sampled again. 1: all its samples in the run count equally; 0: only the latest ones"
        " count.",
        minimum=0,
        maximum=1,
    )

    @property
    def chooses(self) -> bool:
        """Whether any prompt is passed over."""
        return bool(self.between) or self.target is not None


@dataclass
class DataConfig:
    """Training records: prompts (`algorithm.trainer=online` or `preferences`), demonstrations
    (`sft`, `teacher_scores`), preferences (`dpo`, `reward_model`) or labeled steps
    (`reward_model`)."""

    path: str | None = option(
        None,
        "Source of the records: a `.jsonl` file, a directory saved by Hugging Face `datasets`, a"
        " `.txt` file with one prompt per line, `experiment:NAME/FILE`, or a Python function that"
        " yields records, `function:MODULE:CALLABLE`.",
    )
    sources: dict[str, Any] = option(
        {},
        "Several data sources instead of `data.path`, mixed by weight: a mapping from each name"
        " to `path`, `weight` and `fields`.",
    )
    function_timeout_s: float = option(
        3600.0,
        "Time in seconds within which a Python function must yield all its records; the function"
        " runs in a separate process.",
        minimum=0.1,
    )
    tasks: list[Any] = option(
        [],
        "Tasks of reasoning_gym instead of `data.path`, mixed by weight; each is a name or a"
        " mapping of `name`, `weight`, `questions`, `seed`, `difficulty`, `config` and `fields`.",
    )
    task_prompt: str = option(
        "{question}",
        "Template of the prompt for a question of reasoning_gym; must contain `{question}`.",
        read=".tasks!=[]",
    )
    task_messages: bool = option(
        False,
        "Whether the prompt of a task is a user message, rendered by the model's chat template,"
        " instead of plain text.",
        read=".tasks!=[]",
    )
    prompts: list[str] = option(
        [],
        "List of prompts, instead of `data.path`.",
        read=".path=null and .sources={} and .tasks=[]",
    )
    fields: dict[str, Any] = option(
        {},
        "Mapping from aligner's field names to those of the data, such as `{prompt: question}`,"
        " or to a template, such as `{prompt: 'Q: {question}'}`. Used for each source without its"
        " own `fields`.",
        read=".path!=null or .sources!={} or .tasks!=[]",
    )
    skip_bad_records: bool = option(
        False,
        "Whether to skip invalid records and report their number; false means that the first"
        " invalid record is an error.",
    )
    prompt_after: str | None = option(
        None,
        "Text after whose first occurrence the prompt starts, to cut a longer text; null means"
        " the start of the text.",
    )
    prompt_before: str | None = option(
        None,
        "Text before whose last occurrence the prompt ends, to cut a longer text; null means the"
        " end of the text.",
    )
    max_prompt_tokens: int = option(
        64,
        "Maximum prompt length in tokens, including special tokens that the tokenizer prepends;"
        " `data.long_prompts` defines what happens to longer prompts.",
        minimum=1,
    )
    long_prompts: str = option(
        "error",
        "Handling of prompts longer than `data.max_prompt_tokens`. `error`: an invalid record;"
        " `drop`: the record is skipped; `cut_start`, `cut_end`: the start or the end is cut off."
        " Chat messages are never cut: a longer one is an invalid record.",
        choices=("error", "drop", "cut_start", "cut_end"),
    )
    max_response_tokens: int = option(
        64,
        "Maximum response length in tokens, including the end-of-sequence token; a longer"
        " response makes the record invalid.",
        minimum=2,
        read="algorithm.trainer=sft|dpo|reward_model|teacher_scores",
    )
    end_of_sequence: bool = option(
        True,
        "Whether to append an end-of-sequence token to each response; set false for a reward"
        " model that scores responses truncated at the maximum length.",
        read="algorithm.trainer=sft|dpo|reward_model|teacher_scores",
    )
    margin: bool = option(
        True,
        "Whether to use the `margin` of each record, by which the chosen response should be"
        " ahead; false ignores the field.",
        read=(
            "algorithm.trainer=reward_model or algorithm.trainer=dpo and"
            " algorithm.preference.kind=rpo_fwd_kl|rpo_bwd_kl|rpo_sq"
        ),
    )
    learned_turns: str = option(
        "last",
        "Assistant turns of a conversation that are trained on. `last`: only the last one,"
        " earlier turns belong to the prompt; `all`: every one, including its end-of-turn token.",
        choices=("last", "all"),
        read="algorithm.trainer=sft|teacher_scores",
    )
    drawn_tokens: bool = option(
        True,
        "Whether a response that is stored with its generated token ids uses these, with no"
        " end-of-sequence token appended; false tokenizes its text instead, which responses of a"
        " model with another tokenizer require.",
        read=(
            "algorithm.trainer=sft|dpo|reward_model|teacher_scores or algorithm.trainer=online and"
            " evaluation.every>0"
        ),
    )
    shuffle: bool = option(
        True, "Whether to shuffle the records of each source again in every epoch."
    )
    sort_by: str | None = option(
        None,
        "Numeric record field by which each source is sorted in ascending order; `-FIELD` sorts"
        " in descending order, such as `-pass_rate` from easy to hard. Requires"
        " `data.shuffle=false`.",
        read="algorithm.trainer=online|preferences",
    )
    pass_rate: list[float] = option(
        [],
        "Range `[LOW, HIGH]` of the record field `pass_rate` (0 to 1); records outside it are"
        " skipped. `[]` means no filter.",
        read="algorithm.trainer=online|preferences",
    )
    pass_rate_samples: str | None = option(
        None,
        "File of scored samples of the prompts, written by `aligner evaluate --output`, from"
        " which `pass_rate` is computed: the share of a prompt's samples that pass.",
        read="algorithm.trainer=online|preferences",
    )
    pass_threshold: float | None = option(
        1.0,
        "Reward score at or above which a sample passes; null means partial passing, by the"
        " score clipped to 0..1.",
        read="algorithm.trainer=online or .pass_rate_samples!=null",
    )
    curriculum: CurriculumConfig = section(CurriculumConfig, read="algorithm.trainer=online")
    batch_size: int = option(
        32, "Rows per training step.", minimum=1, read="algorithm.trainer=sft|dpo|reward_model"
    )
    held_out: int = option(
        0,
        "Rows of each source that are held out for evaluation and never trained on, selected at"
        " random by `seed`; with `data.shuffle=false` the last ones.",
        minimum=0,
        read="algorithm.trainer=sft|dpo|reward_model",
    )
    normalization: str | None = option(
        None,
        "File of samples of the initial policy, each with a prompt and a response, on which the"
        " reward model's scores are normalized; null means the responses of the preferences.",
        read="algorithm.trainer=reward_model",
    )
    normalization_samples: int = option(
        256,
        "Number of samples, from the first one, that are used for normalization.",
        minimum=2,
        read="algorithm.trainer=reward_model",
    )
