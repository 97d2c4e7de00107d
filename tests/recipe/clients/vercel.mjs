// Vercel's AI SDK, streamed: chat completions, by two of its clients, and Anthropic's messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, apiKey] = [process.env.OPENAI_BASE_URL, process.env.OPENAI_API_KEY];
const model = {
  chat: () => createOpenAI({ baseURL, apiKey }).chat("any"),
  compatible: () => createOpenAICompatible({ name: "x", baseURL, apiKey, includeUsage: true })("any"),
  messages: () => createAnthropic({ baseURL, apiKey })("any"),
}[process.argv[2]]();
const look = tool({
  description: "Look at a place.",
  inputSchema: z.object({ place: z.string() }),
  execute: async ({ place }) => `a lamp in the ${place}`,
});
const result = streamText({
  model,
  system: "You play a game.",
  prompt: "Find the lamp.",
  tools: { look },
  stopWhen: stepCountIs(5),
  maxOutputTokens: 64,
  onError: ({ error }) => { throw error; },
});
let text = "";
for await (const part of result.textStream) text += part;
const usage = await result.totalUsage;
if (!(usage.inputTokens > 0 && usage.outputTokens > 0)) throw new Error(`usage: ${JSON.stringify(usage)}`);
console.log(text);
