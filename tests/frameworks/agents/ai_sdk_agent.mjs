// An agent of the Vercel AI SDK: by default with the Responses API, with the argument `chat` with
// chat completions, with the argument `stream` with streamed responses.
import { openai } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { calls, report, task } from "./reporting.mjs";

const model = process.argv.includes("chat") ? openai.chat("policy") : openai("policy");
const settings = { model, system: "Be brief.", prompt: task.asked, maxRetries: 0 };
if (task.mode === "tool") {
  const multiply = tool({
    description: "Multiply two numbers.",
    inputSchema: z.object({ a: z.int(), b: z.int() }),
    execute: ({ a, b }) => {
      calls.push([a, b]);
      return a * b;
    },
  });
  const generate = process.argv.includes("stream") ? streamText : generateText;
  const result = await generate({ ...settings, tools: { multiply }, stopWhen: stepCountIs(3) });
  await report(await result.text);
} else {
  const schema = z.object({ a: z.int(), b: z.int(), product: z.int() });
  const result = await generateText({ ...settings, output: Output.object({ schema }) });
  await report(result.output);
}
