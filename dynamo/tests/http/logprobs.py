"""Log-probabilities, with drafts and without."""

import asyncio
import sys

from checks import LENGTH, PROMPTS, same
from stack import MODEL, Stack, chat


def logprobs(worker, _):
    """By the openai client: of chats and of completions, whole and as a stream, and beside requests that ask for none."""
    def of_chat(content, text, count):
        same("".join(one.token for one in content).rstrip("\n"), text.rstrip("\n"), "the tokens")
        for one in content:
            tops = one.top_logprobs
            # The token itself comes too where it is none of the likeliest.
            if not count <= len(tops) <= count + 1 or one.logprob > 0:
                sys.exit(f"{one}: expected {count} tokens and numbers up to 0")
            if [top.logprob for top in tops[:count]] != sorted((top.logprob for top in tops[:count]), reverse=True):
                sys.exit(f"{one}: expected the likeliest first")
            if count and tops[0].logprob != one.logprob:
                sys.exit(f"{one}: expected the likeliest token")

    async def main(stack):
        client = stack.client()
        want = {prompt: (await chat(client, prompt, LENGTH))[0] for prompt in PROMPTS}
        ask = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0}

        async def one(prompt, count):
            messages = [{"role": "user", "content": prompt}]
            options = {**ask, "messages": messages, "logprobs": True, "top_logprobs": count}
            whole = (await client.chat.completions.create(**options)).choices[0]
            same(whole.message.content, want[prompt], "with log-probabilities")
            of_chat(whole.logprobs.content, want[prompt], count)
            streamed = []
            async for part in await client.chat.completions.create(**options, stream=True):
                if part.choices and part.choices[0].logprobs:
                    streamed += part.choices[0].logprobs.content
            same([x.token for x in streamed], [x.token for x in whole.logprobs.content], "streamed")
            # Others are beside it, and so roundings differ.
            if any(abs(x.logprob - y.logprob) > 1e-3 for x, y in zip(streamed, whole.logprobs.content)):
                sys.exit(f"streamed: {streamed}, whole: {whole.logprobs.content}")
            return len(streamed)

        async def completion(prompt):
            answer = (await client.completions.create(**ask, prompt=prompt, logprobs=3)).choices[0]
            told = answer.logprobs
            if not len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) > 0:
                sys.exit(f"a completion: {told}")
            for token, logprob, tops in zip(told.tokens, told.token_logprobs, told.top_logprobs):
                same(tops[token], max(tops.values()), "the likeliest token of a completion")
                # The one is printed as an f32, the other as an f64.
                if abs(tops[token] - logprob) > 1e-6:
                    sys.exit(f"{token!r}: {logprob}, and among the likeliest {tops[token]}")

        asked = [one(prompt, [0, 1, 5, 20, 3][n]) for n, prompt in enumerate(PROMPTS)]
        plain = [chat(client, prompt, LENGTH) for prompt in PROMPTS]
        counts, texts = await asyncio.gather(asyncio.gather(*asked), asyncio.gather(*plain))
        same([text for text, _, _ in texts], list(want.values()), "beside those who ask")
        for prompt in PROMPTS:
            await completion(prompt)
        # Nothing comes twice where that is made unlikely enough.
        ids = {**ask, "logprobs": True, "extra_body": {"ignore_eos": True, "return_tokens_as_token_ids": True}}
        messages = [{"role": "user", "content": PROMPTS[0]}]
        for penalty in ("presence_penalty", "frequency_penalty"):
            answer = await client.chat.completions.create(**ids, messages=messages, **{penalty: 2})
            tokens = [one.token for one in answer.choices[0].logprobs.content]
            whole = await client.chat.completions.create(**ids, messages=messages)
            before = [one.token for one in whole.choices[0].logprobs.content]
            if len(set(tokens)) <= len(set(before)):
                sys.exit(f"{penalty}: {len(set(tokens))} different tokens, {len(set(before))} without")
        return sum(counts)

    for args, by in (([], None), (["--draft", "4"], "text"), (["--mtp", "on"], "head")):
        with Stack(worker, [["--cpu", *args]]) as stack:
            count = stack.run(main)
            if by and not stack.workers[0].metric("drafts_accepted_total", f'by="{by}"'):
                sys.exit(f"{args}: expected drafts that are right")
        print(f"{' '.join(args) or 'no drafts'}: log-probabilities of {count} tokens, and texts as without")
