"""An example environment for `verifiers`: products, with a calculator tool and a custom harness."""

import json

import verifiers.v1 as vf
from openai import AsyncOpenAI

TURNS = 4


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """Tool server that all episodes share."""

    TOOL_PREFIX = None

    @vf.tool
    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b


class ProductData(vf.TaskData):
    """Data of a task: the prompt and the correct answer."""

    answer: str


class ProductTask(vf.Task[ProductData]):
    """A task: compute a product."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is the product, else 0."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class ProductsTaskset(vf.Taskset[ProductTask, vf.TasksetConfig]):
    """All products of two numbers from 2 to 9."""

    def load(self) -> list[ProductTask]:
        """Return all tasks. verifiers calls this method."""
        numbers = range(2, 10)
        return [
            ProductTask(ProductData(prompt=f"{a}*{b}?", answer=str(a * b)))
            for a in numbers
            for b in numbers
        ]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        """Return the tool servers of the taskset. verifiers calls this method."""
        return [Calculator(vf.SharedToolsetConfig())]


class ProductsHarness(vf.Harness[vf.HarnessConfig]):
    """Tool-calling loop in the verifiers process.

    A harness that is a separate program would have to be started for every episode.
    """

    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run one episode of at most `TURNS` requests. verifiers calls this method.

        Args:
            ctx: Model of the episode.
            trace: Record of the episode.
            runtime: Runtime of the episode.
            endpoint: Base URL of the OpenAI-compatible endpoint.
            secret: API key of the endpoint.
            mcp_urls: Address of each tool server, by name.
            data: Data of the task.
        """
        from contextlib import AsyncExitStack

        from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

        _, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with (
            AsyncExitStack() as stack,
            AsyncOpenAI(base_url=endpoint, api_key=secret) as client,
        ):
            tools, places, connections = await connect_mcp(servers, stack)
            for _ in range(TURNS):
                said = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools
                )
                message = said.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    try:
                        content = await call_mcp(
                            connections,
                            places,
                            call.function.name,
                            json.loads(call.function.arguments),
                        )
                    except (KeyError, ValueError) as error:
                        content = f"error: {error}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ProductsHarness", "ProductsTaskset"]


if __name__ == "__main__":
    Calculator.run()
