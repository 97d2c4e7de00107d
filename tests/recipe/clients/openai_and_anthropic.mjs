// The clients of OpenAI and Anthropic in JavaScript, with their own helpers for tools and streams.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const parameters = { type: "object", properties: { place: { type: "string" } }, required: ["place"] };
const look = ({ place }) => `a lamp in the ${place}`;
const system = "You play a game.";
const task = "Find the lamp.";

const players = {
  async chat() {
    const runner = new OpenAI().chat.completions.runTools({
      model: "any",
      stream: true,
      messages: [{ role: "system", content: system }, { role: "user", content: task }],
      tools: [{ type: "function", function: { name: "look", function: look, parse: JSON.parse, parameters } }],
    });
    return await runner.finalContent();
  },
  async responses() {
    const client = new OpenAI();
    const tools = [{ type: "function", name: "look", parameters, strict: false }];
    let request = { model: "any", instructions: system, input: task, tools };
    for (;;) {
      const response = await client.responses.stream(request).finalResponse();
      const calls = response.output.filter((item) => item.type === "function_call");
      if (!calls.length) return response.output_text;
      const outputs = calls.map((call) => ({
        type: "function_call_output", call_id: call.call_id, output: look(JSON.parse(call.arguments)),
      }));
      request = { ...request, input: outputs, previous_response_id: response.id };
    }
  },
  async messages() {
    const client = new Anthropic();
    const tools = [{ name: "look", input_schema: parameters }];
    const messages = [{ role: "user", content: task }];
    for (;;) {
      const reply = await client.messages.stream({ model: "any", max_tokens: 64, system, messages, tools }).finalMessage();
      messages.push({ role: "assistant", content: reply.content });
      const calls = reply.content.filter((block) => block.type === "tool_use");
      if (!calls.length) return reply.content[0].text;
      messages.push({
        role: "user",
        content: calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: look(call.input) })),
      });
    }
  },
};
console.log(await players[process.argv[2]]());
