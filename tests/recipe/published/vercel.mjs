// Vercel's AI SDK: streamText with a tool.
import { openai } from "@ai-sdk/openai";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const result = streamText({
  model: openai("gpt-4o"),
  prompt: process.argv[2],
  tools: {
    weather: tool({
      description: "Get the weather in a place",
      inputSchema: z.object({ location: z.string().describe("The place") }),
      execute: async ({ location }) => ({ location, temperature: 22 }),
    }),
  },
  stopWhen: stepCountIs(5),
});
for await (const text of result.textStream) process.stdout.write(text);
console.log();
