"""Many clients at once."""

import asyncio
import os
import random
import sys
import time

import aiohttp
from checks import PROMPTS, same
from stack import MODEL, Stack, chat

CLIENTS = 64
# Resident memory may still grow so much, in MiB, after the first third: buffers of the allocator, and samples of metrics.
GROWTH = 24

# What a server has to refuse, and go on.
MALFORMED = [
    b"{",
    b"[]",
    b'{"model": "demo"}',
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 7},
    {"max_tokens": -3},
    {"messages": []},
    {"messages": [{"role": "user", "content": "word " * 20000}]},
    {"model": "nobody"},
    {"logprobs": True, "top_logprobs": 21},
    {"presence_penalty": 9},
    {"min_p": 1.5},
    {"n": 2},
]


def load(worker, _):
    """64 clients with cancelled and malformed requests among theirs: each answer is the one that its prompt gets alone."""
    seconds = float(os.environ.get("LOAD_SECONDS", "600"))
    with Stack(worker, [["--cpu"]]) as stack:
        stack.run(clients, seconds)


async def clients(stack, seconds):
    client, chance = stack.client(), random.Random(7)
    cases = {}
    for n in range(40):
        options = {"max_tokens": chance.randint(1, 80), "extra_body": {"ignore_eos": chance.random() < 0.5}}
        if n % 4 == 0:
            options |= {"temperature": 0.9, "seed": n, "top_p": 0.95}
        prompt = f"{chance.choice(PROMPTS)} {n % 9} " * chance.randint(1, 12)
        tokens = options.pop("max_tokens")
        text, _, _ = await chat(client, prompt, tokens, **options)
        cases[n] = (prompt, tokens, options, text)

    end, done, memory = time.monotonic() + seconds, {"whole": 0, "cancelled": 0, "refused": 0, "tokens": 0}, []

    async def one(number):
        chance = random.Random(number)
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < end:
                kind = chance.random()
                if kind < 0.1:
                    await refused(session, chance.choice(MALFORMED))
                    continue
                prompt, tokens, options, want = cases[chance.randrange(len(cases))]
                if kind < 0.25:
                    await cancelled(chance, prompt)
                    continue
                text, _, _ = await chat(client, prompt, tokens, stream=kind < 0.8, **options)
                same(text or "", want or "", f"{prompt!r}, {options}")
                done["whole"] += 1
                done["tokens"] += tokens

    async def refused(session, what):
        body = what if isinstance(what, bytes) else None
        right = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4, "stream": False}
        given = {"data": body, "headers": {"Content-Type": "application/json"}} if body else {"json": right | what}
        async with session.post(f"{stack.url}/v1/chat/completions", **given) as answer:
            text = await answer.text()
            if not 400 <= answer.status < 500:
                sys.exit(f"{what if len(str(what)) < 200 else 'a long prompt'}: status {answer.status}: {text[:500]}")
        done["refused"] += 1

    async def cancelled(chance, prompt):
        messages = [{"role": "user", "content": prompt}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=2000, stream=True, temperature=0, extra_body={"ignore_eos": True}
        )
        after = chance.randint(0, 30)
        async for _ in answer:
            after -= 1
            if after < 0:
                break
        await answer.close()
        done["cancelled"] += 1

    async def watch():
        while time.monotonic() < end:
            memory.append(stack.rss())
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(one(number) for number in range(CLIENTS)))
    # What was cancelled has left the engine.
    idle = time.monotonic() + 20
    left = stack.workers[0].metric
    while left("requests_running") + left("requests_waiting") > 0:
        if time.monotonic() > idle:
            sys.exit("requests are left behind")
        await asyncio.sleep(0.1)
    third = len(memory) // 3
    for name, of in (("worker", [one for one, _ in memory]), ("frontend", [two for _, two in memory])):
        early, late = max(of[:third]), max(of[-third:])
        print(f"{name}: at most {early:.0f} MiB in the first third, {late:.0f} MiB in the last")
        if name == "worker" and late > early + GROWTH:
            sys.exit(f"the {name} grows")
    print(f"{CLIENTS} clients, {seconds:.0f} s: {done['whole']} answers of {done['tokens']} tokens as alone, "
          f"{done['cancelled']} cancelled, {done['refused']} refused")
