// The AI SDK through its provider for OpenAI-compatible servers.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import {
  lacksGuidedDecoding, model, question, schema, scripted, scriptedModel, server,
} from './env.mjs';

const providerOf = (url) => createOpenAICompatible({
  name: 'dflash', baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true,
});
const served = providerOf(server)(model);
const talker = providerOf(scripted)(scriptedModel);
const greedy = { model: served, prompt: question, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const withPolicy = (policy) => ({ providerOptions: { dflash: { dflash: { policy, stats: true } } } });
const add = tool({
  description: 'Adds.',
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: ({ a, b }) => a + b,
});

test('chat is the same with and without speculation', async () => {
  const plain = await generateText({ ...greedy, ...withPolicy('off') });
  const fast = await generateText({ ...greedy, ...withPolicy('static:8') });
  assert.ok(plain.text.length > 0);
  assert.equal(fast.text, plain.text);
  assert.equal(fast.usage.outputTokens, plain.usage.outputTokens);
  assert.equal(fast.response.body.dflash.policy, 'static:8');
});

test('a stream adds up to the whole', async () => {
  const whole = await generateText(greedy);
  const stream = streamText(greedy);
  let text = '';
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  assert.deepEqual((await stream.usage).outputTokens, whole.usage.outputTokens);
});

test('completions', async () => {
  const { text } = await generateText({
    ...greedy, model: providerOf(server).completionModel(model), maxOutputTokens: 8,
  });
  assert.ok(text.length > 0);
});

test('log-probabilities', async () => {
  const { response, usage } = await generateText({
    ...greedy, maxOutputTokens: 8, providerOptions: { dflash: { logprobs: true, top_logprobs: 2 } },
  });
  assert.equal(response.body.choices[0].logprobs.content.length, usage.outputTokens);
});

test('tools: a call, its result, an answer', async () => {
  const options = {
    model: talker, prompt: 'add', tools: { add }, stopWhen: stepCountIs(3), maxRetries: 0,
  };
  const whole = await generateText(options);
  const stream = streamText(options);
  await stream.consumeStream();
  for (const [text, steps] of [[whole.text, whole.steps], [await stream.text, await stream.steps]]) {
    assert.equal(text, 'The sum is 3.');
    assert.equal(steps.length, 2);
    assert.equal(steps[0].finishReason, 'tool-calls');
    assert.equal(steps[0].text, 'I add.');
    assert.equal(steps[0].reasoningText, 'the fox');
    assert.deepEqual(steps[0].toolCalls.map((call) => call.input), [{ a: 1, b: 2 }]);
    assert.deepEqual(steps[0].toolResults.map((result) => result.output), [3]);
  }
});

test('errors', async () => {
  const about = (status, pattern) => (error) =>
    APICallError.isInstance(error) && error.statusCode === status && pattern.test(error.message);
  await assert.rejects(
    generateText({ ...greedy, model: providerOf(server)('nope') }), about(404, /does not exist/));
  await assert.rejects(generateText({ ...greedy, temperature: 3 }), about(400, /temperature/));
  await assert.rejects(generateText({ ...greedy, ...withPolicy('static:99') }), about(400, /static/));
});

test('an error in the middle of a stream', async () => {
  let failure = null;
  const stream = streamText({
    model: talker, prompt: 'break', maxRetries: 0, onError: ({ error }) => { failure = error; },
  });
  let text = '';
  for await (const part of stream.fullStream) if (part.type === 'text-delta') text += part.text;
  assert.equal(text, 'the fox');
  assert.match(String(failure?.message ?? failure), /engine went away/);
});

test('JSON schema', { skip: await lacksGuidedDecoding() }, async () => {
  const output = Output.object({ schema: jsonSchema(schema) });
  const whole = await generateText({ ...greedy, output });
  assert.ok(Number.isInteger(whole.output.answer));
  const stream = streamText({ ...greedy, output });
  await stream.consumeStream();
  assert.deepEqual(await stream.output, whole.output);
});
