// Where the servers are, and what all programs here ask them. Set by tests/e2e/test_other_clients.py.
function need(name) {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set; run \`make test-clients\``);
  return value;
}

/** The started application with the demo pair. */
export const server = need('DFLASH_URL');
export const model = need('DFLASH_MODEL');
/** The gateway over a scripted model that thinks and calls tools. */
export const scripted = need('DFLASH_SCRIPTED_URL');
export const scriptedModel = 'demo/model';

export const question = 'Tom has 3 apples and buys 4 more. How many apples now?';

// Few values, so that a small model comes to an end.
export const schema = {
  type: 'object',
  properties: { answer: { type: 'integer', enum: [3, 4, 7] } },
  required: ['answer'],
  additionalProperties: false,
};

/** Why a test of guided decoding is left out, or false where this server has it. */
export async function lacksGuidedDecoding() {
  const response = await fetch(`${server}/v1/chat/completions`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({
      model,
      messages: [{ role: 'user', content: question }],
      max_tokens: 1,
      response_format: { type: 'json_object' },
    }),
  });
  const body = await response.json();
  return body.error?.code === 'unsupported_parameter' ? 'no guided decoding yet' : false;
}
