"""A DSPy program with the JSON adapter."""

from __future__ import annotations

import dspy
from pydantic import BaseModel
from reporting import API_KEY, BASE_URL, calls, read_task, report


class Product(BaseModel):
    a: int
    b: int
    product: int


class Multiplication(dspy.Signature):
    """Compute the product."""

    question: str = dspy.InputField()
    answer: Product = dspy.OutputField()


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    calls.append([a, b])
    return a * b


task = read_task()
# the cache would answer repeated requests without the policy
language_model = dspy.LM("openai/policy", api_base=BASE_URL, api_key=API_KEY, cache=False)
dspy.configure(lm=language_model, adapter=dspy.JSONAdapter())
if task["mode"] == "tool":
    program = dspy.ReAct("question -> answer: int", tools=[multiply], max_iters=3)
else:
    program = dspy.Predict(Multiplication)
report(task, program(question=task["asked"]).answer)
