"""A task of `inspect-ai`: multiplications, with exact match as the score."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def products() -> Task:
    """64 multiplications of two digits."""
    samples = [
        Sample(id=f"{a}*{b}", input=f"{a}*{b}?", target=str(a * b))
        for a in range(2, 10)
        for b in range(2, 10)
    ]
    return Task(dataset=samples, solver=generate(), scorer=exact())
