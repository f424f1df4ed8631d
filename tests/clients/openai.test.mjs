// The official client for JavaScript.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import OpenAI from 'openai';
import {
  lacksGuidedDecoding, model, question, schema, scripted, scriptedModel, server,
} from './env.mjs';

const clientOf = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });
const client = clientOf(server);
const talker = clientOf(scripted);
const messages = [{ role: 'user', content: question }];
const greedy = { model, messages, temperature: 0, max_tokens: 60 };
const add = {
  type: 'function',
  function: {
    name: 'add',
    parameters: {
      type: 'object',
      properties: { a: { type: 'integer' }, b: { type: 'integer' } },
    },
  },
};

test('models', async () => {
  const ids = [];
  for await (const found of client.models.list()) ids.push(found.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test('chat is the same with and without speculation', async () => {
  const ask = (policy) =>
    client.chat.completions.create({ ...greedy, dflash: { policy, stats: true } });
  const [plain, fast] = [await ask('off'), await ask('static:8')];
  assert.ok(plain.choices[0].message.content.length > 0);
  assert.equal(fast.choices[0].message.content, plain.choices[0].message.content);
  assert.deepEqual(fast.usage, plain.usage);
  assert.ok(fast.dflash.num_cycles < plain.dflash.num_cycles);
});

test('a stream adds up to the whole', async () => {
  const whole = await client.chat.completions.create(greedy);
  const stream = client.chat.completions.stream({
    ...greedy, stream_options: { include_usage: true },
  });
  let text = '';
  stream.on('content', (delta) => { text += delta; });
  const final = await stream.finalChatCompletion();
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(final.choices[0].message.content, text);
  assert.equal(final.choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
});

test('a stream can be left', async () => {
  const stream = await client.chat.completions.create({
    ...greedy, stream: true, max_tokens: 1500, ignore_eos: true,
  });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
});

test('log-probabilities', async () => {
  const options = { ...greedy, max_tokens: 12, logprobs: true, top_logprobs: 3 };
  const answer = await client.chat.completions.create(options);
  const entries = answer.choices[0].logprobs.content;
  assert.equal(entries.length, answer.usage.completion_tokens);
  for (const entry of entries) {
    assert.equal(entry.top_logprobs.length, 3);
    // At temperature 0 the token is the likeliest.
    assert.equal(entry.token, entry.top_logprobs[0].token);
    assert.equal(entry.logprob, entry.top_logprobs[0].logprob);
  }
  const streamed = [];
  for await (const chunk of await client.chat.completions.create({ ...options, stream: true })) {
    streamed.push(...(chunk.choices[0].logprobs?.content ?? []));
  }
  assert.deepEqual(streamed.map((entry) => entry.token), entries.map((entry) => entry.token));
});

test('completions', async () => {
  const answer = await client.completions.create({
    model, prompt: 'Tom has', max_tokens: 8, temperature: 0, echo: true, logprobs: 1,
  });
  const [choice] = answer.choices;
  assert.ok(choice.text.startsWith('Tom has'));
  assert.equal(choice.logprobs.token_logprobs[0], null);
  assert.equal(choice.logprobs.tokens.length, answer.usage.total_tokens);
});

test('the raw response', async () => {
  const { data, response, request_id: id } = await client.chat.completions
    .create({ ...greedy, max_tokens: 4 }, { headers: { 'X-Request-Id': 'mine-1' } })
    .withResponse();
  assert.equal(response.status, 200);
  assert.equal(id, 'mine-1');
  assert.equal(data.object, 'chat.completion');
});

test('errors', async () => {
  const ask = (fields) => client.chat.completions.create({ ...greedy, ...fields });
  const about = (Class, status, code, param) => (error) => {
    assert.ok(error instanceof Class, String(error));
    assert.deepEqual([error.status, error.code, error.param], [status, code, param]);
    return true;
  };
  await assert.rejects(
    ask({ model: 'nope' }), about(OpenAI.NotFoundError, 404, 'model_not_found', 'model'));
  await assert.rejects(
    ask({ temperature: 3 }), about(OpenAI.BadRequestError, 400, 'invalid_value', 'temperature'));
  await assert.rejects(
    ask({ store: true }), about(OpenAI.BadRequestError, 400, 'unsupported_parameter', 'store'));
  await assert.rejects(
    ask({ max_tokens: 5000, stream: true }),
    about(OpenAI.BadRequestError, 400, 'context_length_exceeded', 'max_tokens'));
});

test('an error in the middle of a stream', async () => {
  const stream = await talker.chat.completions.create({
    model: scriptedModel, messages: [{ role: 'user', content: 'break' }], stream: true,
  });
  let text = '';
  await assert.rejects(async () => {
    for await (const chunk of stream) text += chunk.choices[0].delta.content ?? '';
  }, (error) => error instanceof OpenAI.APIError && error.code === 'engine_unavailable');
  assert.equal(text, 'the fox');
});

test('tools: a call, its result, an answer', async () => {
  for (const stream of [false, true]) {
    const asked = [];
    const runner = talker.chat.completions.runTools({
      model: scriptedModel,
      messages: [{ role: 'user', content: 'add' }],
      stream,
      tools: [{
        ...add,
        function: {
          ...add.function,
          parse: JSON.parse,
          function: ({ a, b }) => { asked.push([a, b]); return String(a + b); },
        },
      }],
    });
    assert.equal(await runner.finalContent(), 'The sum is 3.');
    assert.deepEqual(asked, [[1, 2]]);
    assert.equal(runner.messages[1].tool_calls.length, 1);
  }
});

test('tools: a stream of deltas, with reasoning apart', async () => {
  const stream = await talker.chat.completions.create({
    model: scriptedModel, messages: [{ role: 'user', content: 'add' }], tools: [add], stream: true,
  });
  const seen = { reasoning: '', content: '', name: '', args: '', reason: null };
  for await (const { choices: [choice] } of stream) {
    const { delta } = choice;
    seen.reasoning += delta.reasoning_content ?? '';
    seen.content += delta.content ?? '';
    for (const call of delta.tool_calls ?? []) {
      seen.name += call.function.name ?? '';
      seen.args += call.function.arguments ?? '';
    }
    seen.reason = choice.finish_reason ?? seen.reason;
  }
  assert.deepEqual(seen, {
    reasoning: 'the fox', content: 'I add.', name: 'add', args: '{"a": 1, "b": 2}',
    reason: 'tool_calls',
  });
});

test('responses', async () => {
  const options = { model, input: question, temperature: 0, max_output_tokens: 60 };
  const whole = await client.responses.create(options);
  const plain = await client.chat.completions.create(greedy);
  assert.equal(whole.output_text, plain.choices[0].message.content);
  let text = '';
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta;
  }
  assert.equal(text, whole.output_text);
});

test('JSON schema', { skip: await lacksGuidedDecoding() }, async () => {
  const format = { type: 'json_schema', json_schema: { name: 'answer', strict: true, schema } };
  for (const stream of [false, true]) {
    const options = { ...greedy, response_format: format };
    const answer = stream
      ? await client.chat.completions.stream(options).finalChatCompletion()
      : await client.chat.completions.parse(options);
    const value = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(value), ['answer']);
    assert.ok(Number.isInteger(value.answer));
  }
});
