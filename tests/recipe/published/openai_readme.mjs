// The README of OpenAI's client for JavaScript.
import OpenAI from "openai";

const client = new OpenAI();
const response = await client.responses.create({
  model: "gpt-4o",
  instructions: "You are a coding assistant that talks like a pirate",
  input: process.argv[2],
});
console.log(response.output_text);
