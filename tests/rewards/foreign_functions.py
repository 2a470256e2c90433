"""Reward functions in the forms that TRL and verl document."""

from __future__ import annotations

import re


def length_near_twenty(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


def think_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(bool(re.match(r"^<think>.*</think>", content))) for content in contents]


def boxed_equals(prompts, completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in found]
    return [float(left == right) for left, right in zip(contents, ground_truth, strict=True)]


def only_math(prompts, completions, task, **kwargs):
    return [1.0 if each == "math" else None for each in task]


async def asks_a_service(prompts, completions, **kwargs):
    return [float(len(prompt[-1]["content"])) for prompt in prompts]


def reads_the_state(completions, trainer_state, log_metric):
    log_metric("accuracy", 0.5)
    return [float(trainer_state is None)] * len(completions)


def reads_token_ids(prompts, completions, completion_ids):
    return [0.0] * len(completions)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    return 1.0 if solution_str == ground_truth else 0.0


def compute_details(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(extra_info["index"]), "acc": solution_str == ground_truth}


async def compute_later(solution_str, ground_truth):
    return float(solution_str == ground_truth)
