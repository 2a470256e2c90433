// The part of each agent that does not depend on its framework: it reads the task, and reports the
// episode's reward.
import { readFileSync, writeFileSync } from "node:fs";

export const calls = []; // arguments of the tool calls that were executed
export const task = JSON.parse(readFileSync(0, "utf8"));

// Write the result and the executed calls to the file `task.log`, and post the reward.
export async function report(result) {
  const type = typeof result === "string" ? "str" : "Product";
  writeFileSync(task.log, JSON.stringify({ calls, result, type }));
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/reward`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ reward: Number(JSON.stringify(result).includes("42")) }),
  });
  if (!response.ok) throw new Error(await response.text());
}
