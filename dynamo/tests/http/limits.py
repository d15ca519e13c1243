"""What ends an answer, what happens where there is no room, and what a worker tells about itself."""

import asyncio
import json
import sys
import time

import openai
from checks import PROMPTS, same
from stack import MODEL, Stack, chat, get


def options(worker, _):
    """Stop conditions, seeds and usage, as the openai client asks for them."""
    async def main(stack):
        client = stack.client()

        async def answer(tokens, prompt=PROMPTS[0], **more):
            # Not ignore_eos: with it Dynamo's frontend ignores each stop condition.
            ask = {"temperature": 0} | more
            messages = [{"role": "user", "content": prompt}]
            got = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=tokens, **ask)
            return got.choices[0], got.usage

        whole, usage = await answer(60)
        same((whole.finish_reason, usage.completion_tokens), ("length", 60), "the end by max_tokens")
        text = whole.message.content
        # A word within, and where it comes first.
        word = text.split()[len(text.split()) // 2]
        cut, usage = await answer(60, stop=[word])
        same((cut.message.content, cut.finish_reason), (text[:text.index(word)], "stop"), "the end by stop")
        if not 0 < usage.completion_tokens < 60:
            sys.exit(f"{usage}: expected an answer that ended before")
        # By the number of a token, which is told in the place of its text.
        told, _ = await answer(60, logprobs=True, extra_body={"return_tokens_as_token_ids": True})
        ids = [int(one.token.split(":")[1]) for one in told.logprobs.content]
        n = next(n for n in range(20, 60) if ids[n] not in ids[:n])
        for least, want in ((0, n), (n + 5, 60 if ids[n] not in ids[n + 5:] else ids.index(ids[n], n + 5))):
            ended, usage = await answer(60, extra_body={"stop_token_ids": [ids[n]], "min_tokens": least})
            if not want <= usage.completion_tokens <= want + 1:
                sys.exit(f"stop_token_ids, min_tokens {least}: expected {want} tokens, got {usage.completion_tokens}")
            same(ended.finish_reason, "stop" if want < 60 else "length", "the end by stop_token_ids")
        drawn = [(await answer(40, temperature=1, seed=seed))[0].message.content for seed in (1, 1, 2)]
        if drawn[0] != drawn[1] or drawn[0] == drawn[2]:
            sys.exit(f"seeds: expected two answers alike and one that differs, got {drawn}")
        # A stream ends with what was used, where that is asked for.
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": PROMPTS[0]}], max_tokens=60, temperature=0, stream=True,
            stream_options={"include_usage": True}
        )
        parts = [part async for part in stream]
        _, usage = await answer(60)
        same((parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens), (usage.prompt_tokens, 60), "usage")

    with Stack(worker, [["--cpu"]]) as stack:
        stack.run(main)
    print("answers end by max_tokens, stop, stop_token_ids behind min_tokens; seeds repeat; streams tell usage")


def full(worker, _):
    """A worker without room refuses at once, and soon serves again; with a second worker nobody is refused."""
    async def burst(stack, count):
        client = stack.client()

        async def one(n):
            start = time.monotonic()
            try:
                return (await chat(client, f"{PROMPTS[0]} {n}", 300, extra_body={"ignore_eos": True}))[0]
            except openai.APIStatusError as error:
                same(error.status_code, 529, "the status of a refusal")
                return time.monotonic() - start

        want = [await one(n) for n in range(count)]
        got = await asyncio.gather(*(one(n) for n in range(count)))
        served = [n for n in range(count) if isinstance(got[n], str)]
        same([got[n] for n in served], [want[n] for n in served], "beside the others")
        start = time.monotonic()
        while not isinstance(again := await one(0), str):
            if time.monotonic() - start > 2:
                sys.exit("a worker that has refused a request is not asked again")
            await asyncio.sleep(0.1)
        same(again, want[0], "after refusals")
        return len(served), max((it for it in got if not isinstance(it, str)), default=0)

    small = ["--cpu", "--batch", "2", "--max-waiting", "3"]
    with Stack(worker, [small]) as stack:
        served, slowest = stack.run(burst, 12)
        counted = stack.workers[0].metric("dynamo_rejection_request_total")
    # Of the two that Dynamo's queue has room for, the second one may come before the first one is looked at.
    if not 4 <= served <= 5 or slowest > 0.5 or not 0 < counted <= 12 - served:
        sys.exit(f"room for five: {served} of 12 answers, refused within {slowest:.2f} s, {counted:.0f} by the worker")
    with Stack(worker, [small, ["--cpu"]], ["--migration-limit", "3"]) as stack:
        at_two, _ = stack.run(burst, 16)
    same(at_two, 16, "answers of two workers")
    print(f"room for five: {served} of 12 answers, {12 - served} refused with status 529 within {slowest:.2f} s, then served "
          f"again; of two workers with room for more: 16 of 16 answers")


def signals(worker, _):
    """Health, and metrics whose values are known."""
    long = "In the beginning God created the heaven and the earth. " * 8

    async def main(stack):
        client, one = stack.client(), stack.workers[0]
        fed = drawn = 0
        for n in range(4):
            _, _, usage = await chat(client, f"{long} {n}", 40, stream=False, extra_body={"ignore_eos": True})
            fed, drawn = fed + usage.prompt_tokens, drawn + usage.completion_tokens
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "And"}], max_tokens=2000, stream=True,
            temperature=0, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        running = one.metric("requests_running")
        await stream.close()
        end = time.monotonic() + 20
        while one.metric("requests_total", 'reason="cancelled"') < 1:
            if time.monotonic() > end:
                sys.exit("a request is not cancelled")
            await asyncio.sleep(0.05)
        same((running, one.metric("requests_running"), one.metric("requests_waiting")), (1, 0, 0), "the queue")
        same(one.metric("requests_total", 'reason="length"'), 4, "requests that ended")
        same((one.metric("pool_sequences"), one.metric("tokens_held")), (3, 0), "the pool")
        asked, reused = one.metric("prefix_asked_tokens_total"), one.metric("prefix_reused_tokens_total")
        # The cancelled one has a prompt too.
        if not fed < asked < fed + 64 or reused % 64 or not 64 <= reused < asked:
            sys.exit(f"tokens of prompts: {fed} by usage, {asked:.0f} and {reused:.0f} reused by the worker")
        same(one.metric("prompt_tokens_total"), asked - reused, "tokens of prompts that were fed")
        if one.metric("prefix_hits_total") + one.metric("prefix_misses_total") != 5 or not one.metric("prefix_bytes"):
            sys.exit("expected a hit or a miss for each of 5 prompts, and bytes of what is kept")
        drafts, right = one.metric("drafts_total", 'by="text"'), one.metric("drafts_accepted_total", 'by="text"')
        if not 0 < right <= drafts:
            sys.exit(f"{right:.0f} of {drafts:.0f} drafts are right")
        if one.metric("decode_tokens_total") < drawn - 4:
            sys.exit(f"{drawn} tokens by usage, {one.metric('decode_tokens_total'):.0f} by the worker")
        for path in ("health", "live"):
            told = json.loads(get(f"{one.url}/{path}"))
            same((told["status"], told["endpoints"]["generate"]), ("ready", "ready"), path)

    with Stack(worker, [["--cpu", "--batch", "3", "--draft", "4"]]) as stack:
        stack.run(main)
    print("health, and the metrics of 4 answers and one that was cancelled, are as they should be")
