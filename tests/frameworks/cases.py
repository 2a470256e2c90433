"""The episodes of the test matrix: framework, mode, and the turns that the policy writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

QUESTION = "What is 6 times 7?"
PRODUCT = {"a": 6, "b": 7, "product": 42}
SENTENCE = "The product is 42."


def call(name: str, **arguments: Any) -> str:
    """Return a turn of the policy that calls a tool, in the format of the model's template."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


MULTIPLY = call("multiply", a=6, b=7)
PRODUCT_TEXT = json.dumps(PRODUCT)


@dataclass(frozen=True)
class Case:
    """One episode of a framework."""

    environment: str
    """Name of the separate environment; see `benchmarks.peer_environment`."""
    mode: str
    """`tool` or `structured`: the episode that the agent runs."""
    turns: tuple[str, ...]
    """Texts of the policy's turns, in order."""
    argument: str = ""
    """Argument of the agent's program."""
    program: str = ""
    """Name of the agent's program without `_agent`; empty: that of the environment."""
    result: Any = SENTENCE
    """Result of the agent."""
    result_type: str = "str"
    """Name of the result's type in the agent."""
    calls: int = 0
    """Number of executed calls of the tool `multiply`."""
    branches: int = 0
    """Number of branches of the sample beside the main sequence."""

    @property
    def name(self) -> str:
        """Name of the test."""
        program = self.program or self.environment
        return "-".join(filter(None, (program, self.argument, self.mode)))


def _with_tool(environment: str, argument: str = "", **changes: Any) -> Case:
    """Return an episode in which the policy calls the tool, and answers with a sentence."""
    fields: dict[str, Any] = {"turns": (MULTIPLY, SENTENCE), "calls": 1} | changes
    return Case(environment, "tool", argument=argument, **fields)


def _structured(environment: str, argument: str = "", **changes: Any) -> Case:
    """Return an episode in which the policy writes the result as JSON."""
    fields: dict[str, Any] = {"turns": (PRODUCT_TEXT,), "result": PRODUCT, "result_type": "Product"}
    return Case(environment, "structured", argument=argument, **fields | changes)


CASES = (
    _with_tool("openai"),
    _structured("openai"),
    _with_tool("openai", program="openai_responses"),
    _structured("openai", program="openai_responses"),
    _with_tool("openai_node"),
    _structured("openai_node"),
    _with_tool("openai_agents"),
    _structured("openai_agents"),
    _with_tool("openai_agents", "stream"),
    _with_tool("openai_agents", "chat"),
    _structured("openai_agents", "chat"),
    _with_tool("ai_sdk"),
    _structured("ai_sdk"),
    _with_tool("ai_sdk", "stream"),
    _with_tool("ai_sdk", "chat"),
    _structured("ai_sdk", "chat"),
    _with_tool("langgraph"),
    _structured("langgraph", turns=(MULTIPLY, call("Product", **PRODUCT)), calls=1),
    _structured("langgraph", "provider", turns=(MULTIPLY, PRODUCT_TEXT), calls=1),
    _with_tool("pydantic_ai"),
    _structured("pydantic_ai", turns=(MULTIPLY, call("final_result", **PRODUCT)), calls=1),
    _structured("pydantic_ai", "native", turns=(MULTIPLY, PRODUCT_TEXT), calls=1),
    _with_tool(
        "smolagents",
        turns=(MULTIPLY, call("final_answer", answer=SENTENCE)),
        result_type="AgentText",
        branches=1,
    ),
    _structured(
        "smolagents",
        turns=(MULTIPLY, call("final_answer", **PRODUCT)),
        calls=1,
        result_type="dict",
        branches=1,
    ),
    _with_tool(
        "smolagents",
        "code",
        turns=(
            "Thought: I multiply.\n<code>\nx = multiply(6, 7)\nprint(x)\n</code>",
            'Thought: I know it.\n<code>\nfinal_answer(f"The product is {x}.")\n</code>',
        ),
        result_type="AgentText",
    ),
    _structured(
        "smolagents",
        "code",
        turns=(
            json.dumps(
                {
                    "thought": "I multiply.",
                    "code": 'x = multiply(6, 7)\nfinal_answer({"a": 6, "b": 7, "product": x})',
                }
            ),
        ),
        calls=1,
        result_type="dict",
    ),
    _with_tool("litellm"),
    _structured("litellm"),
    _with_tool(
        "dspy",
        turns=(
            json.dumps(
                {
                    "next_thought": "I multiply.",
                    "next_tool_name": "multiply",
                    "next_tool_args": {"a": 6, "b": 7},
                }
            ),
            json.dumps(
                {"next_thought": "I am done.", "next_tool_name": "finish", "next_tool_args": {}}
            ),
            json.dumps({"reasoning": "6 times 7 is 42.", "answer": 42}),
        ),
        result=42,
        result_type="int",
        branches=2,
    ),
    _structured("dspy", turns=(json.dumps({"answer": PRODUCT}),)),
    _with_tool("autogen"),
    _with_tool("autogen", "reflect", branches=1),
    _structured("autogen"),
    _with_tool("llama_index"),
    _structured("llama_index", turns=(call("Product", **PRODUCT),)),
    _with_tool("anthropic"),
    _with_tool("anthropic", "stream"),
    _structured("anthropic"),
)
"""All episodes of `make test-frameworks`."""
