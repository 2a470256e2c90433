// An agent that uses OpenAI's client for Node.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { calls, report, task } from "./reporting.mjs";

const client = new OpenAI();
const messages = [{ role: "user", content: task.asked }];
const numbers = { a: { type: "integer" }, b: { type: "integer" } };
if (task.mode === "tool") {
  const runner = client.chat.completions.runTools({
    model: "policy",
    messages,
    tools: [
      {
        type: "function",
        function: {
          name: "multiply",
          description: "Multiply two numbers.",
          parameters: { type: "object", properties: numbers, required: ["a", "b"] },
          parse: JSON.parse,
          function: ({ a, b }) => {
            calls.push([a, b]);
            return String(a * b);
          },
        },
      },
    ],
  });
  await report(await runner.finalContent());
} else {
  const product = z.object({ a: z.int(), b: z.int(), product: z.int() });
  const completion = await client.chat.completions.parse({
    model: "policy",
    messages,
    response_format: zodResponseFormat(product, "product"),
  });
  await report(completion.choices[0].message.parsed);
}
