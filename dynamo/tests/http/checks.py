"""One client, or a few."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time

from stack import MODEL, Stack, chat

PROMPTS = [
    "In the beginning God created the heaven and the earth.",
    "And God said,",
    "Blessed are the meek",
    "The LORD is my shepherd; I shall not want.",
    "Wer ist da? \U0001f40d é",
]
LENGTH = 48


def same(got, want, what):
    if got != want:
        sys.exit(f"{what}: expected\n{want!r}\ngot\n{got!r}")


def chat_equals_generate(worker, generate):
    """Streams and whole answers, by curl and by the openai client, are what `generate --chat` prints."""
    def of_generate(prompt):
        command = [generate, "--cpu", "--chat", "--temperature", "0", "-n", str(LENGTH), "--prompt", prompt]
        return subprocess.run(command, check=True, capture_output=True).stdout.decode().rstrip("\n")

    want = {prompt: of_generate(prompt) for prompt in PROMPTS}

    async def by_client(stack):
        client = stack.client()
        for prompt, text in want.items():
            streamed, times, _ = await chat(client, prompt, LENGTH)
            same(streamed.rstrip("\n"), text, "streamed")
            whole, _, usage = await chat(client, prompt, LENGTH, stream=False)
            same(whole.rstrip("\n"), text, "whole")
            same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "usage")
            if len(times) < 5:
                sys.exit(f"{len(times)} parts are no stream")

    def by_curl(stack):
        for prompt, text in want.items():
            body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": LENGTH,
                    "temperature": 0, "stream": True}
            command = ["curl", "-sN", f"{stack.url}/v1/chat/completions", "-H", "Content-Type: application/json",
                       "-d", json.dumps(body)]
            lines = subprocess.run(command, check=True, capture_output=True).stdout.decode().splitlines()
            data = [line[6:] for line in lines if line.startswith("data: ")]
            same(data.pop(), "[DONE]", "the last line")
            parts = [json.loads(part)["choices"] for part in data]
            got = "".join(choice["delta"].get("content") or "" for choices in parts for choice in choices)
            same(got.rstrip("\n"), text, "by curl")

    with Stack(worker, [["--cpu"]]) as stack:
        stack.run(by_client)
        by_curl(stack)
    print(f"{len(PROMPTS)} prompts of {LENGTH} tokens by curl and by the openai client are as `generate --chat`")


async def solo(stack, prompts, tokens):
    """What each prompt gets alone."""
    client, answers = stack.client(), {}
    for prompt in prompts:
        answers[prompt], _, _ = await chat(client, prompt, tokens, extra_body={"ignore_eos": True})
    return answers


def drain(worker, _):
    """SIGTERM: what runs ends as it should, and the worker with it."""
    async def main(stack):
        want = await solo(stack, PROMPTS[:2], 1000)
        client = stack.client()
        # A request that the frontend has no answer of yet would go elsewhere, where there is another worker.
        began, options = [asyncio.Event() for _ in want], {"extra_body": {"ignore_eos": True}}
        asked = [chat(client, prompt, 1000, began=event, **options) for prompt, event in zip(want, began)]
        tasks = [asyncio.create_task(one) for one in asked]
        for event in began:
            await event.wait()
        same(stack.workers[0].metric("requests_running"), len(want), "requests that run")
        stack.workers[0].process.send_signal(signal.SIGTERM)
        for task, text in zip(tasks, want.values()):
            same((await task)[0], text, "while the worker ends")
        status = await asyncio.to_thread(stack.workers[0].process.wait, 30)
        same(status, 0, "exit status")

    with Stack(worker, [["--cpu"]]) as stack:
        stack.run(main)
    print("after SIGTERM two answers came whole and the worker ended with status 0")


def migration(worker, _, place=Stack):
    """A worker is killed: its requests end on the other one, and nobody notices."""
    prompts = [f"{prompt} {n}" for n in range(3) for prompt in PROMPTS]

    async def main(stack):
        want = await solo(stack, prompts, 1000)
        client = stack.client()
        tasks = [asyncio.create_task(chat(client, prompt, 1000, extra_body={"ignore_eos": True})) for prompt in want]
        while min(one.metric("requests_running") for one in stack.workers) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        lost = stack.workers[0].metric("requests_running")
        stack.workers[0].kill()
        for task, (prompt, text) in zip(tasks, want.items()):
            same((await task)[0], text, f"{prompt!r} with a worker killed")
        return lost

    with place(worker, [["--cpu"]] * 2, ["--migration-limit", "3"]) as stack:
        lost = stack.run(main)
    print(f"{len(prompts)} answers are whole; a killed worker had {lost:.0f} of them")
    if lost < 1:
        sys.exit("expected a worker that is killed while it has requests")


def handoff(worker, _, place=Stack):
    """One worker feeds prompts, another completes them."""
    prompts = [f"{prompt} {n} " * (1 + 5 * n) for n in range(4) for prompt in PROMPTS]

    async def together(stack):
        client = stack.client()
        tasks = [chat(client, prompt, 60, extra_body={"ignore_eos": True}) for prompt in prompts]
        return [text for text, _, _ in await asyncio.gather(*tasks)]

    args = ["--cpu", "--prefix-cache", "0"]
    with place(worker, [args]) as stack:
        want = stack.run(together)
    with place(worker, [[*args, "--disaggregation-mode", mode] for mode in ("prefill", "decode")]) as stack:
        same(stack.run(together), want, "by two workers")
        fed = [one.metric("prompt_tokens_total") for one in stack.workers]
        drawn = [one.metric("decode_tokens_total") for one in stack.workers]
    print(f"{len(prompts)} answers are as one worker's; tokens of prompts fed by the first worker {fed[0]:.0f}, by the "
          f"second {fed[1]:.0f}; tokens of decode steps {drawn[0]:.0f} and {drawn[1]:.0f}")
    # The last token of each prompt is the second one's; its health check has a prompt too.
    if not fed[1] <= len(prompts) + 5 < fed[0] or drawn[0] > 0:
        sys.exit("expected the first worker to feed all prompts, and the second to complete them")


def routing(worker, _, place=Stack):
    """Of the tokens that one worker takes from its cache of beginnings, two workers with the router take nearly as many."""
    shuffled, trace = random.Random(1), []
    for group in range(24):
        words = shuffled.choices("and the of unto that he shall lord his for is".split(), k=300)
        trace += [" ".join(words) + f" group {group}: {n} {shuffled.random()}" for n in range(5)]
    shuffled.shuffle(trace)

    async def hits(stack):
        client = stack.client()
        for prompt in trace:
            await chat(client, prompt, 4)
            # What is kept is known to the router a moment later.
            await asyncio.sleep(0.05)
        sums = [[one.metric(f"prefix_{kind}_tokens_total") for kind in ("reused", "asked")] for one in stack.workers]
        return sum(reused for reused, _ in sums), sum(asked for _, asked in sums), [asked for _, asked in sums]

    args = ["--cpu", "--max-seq-len", "4096"]
    with place(worker, [args]) as stack:
        one, asked, _ = stack.run(hits)
    with place(worker, [args] * 2, ["--router-mode", "kv"]) as stack:
        two, _, shares = stack.run(hits)
    with place(worker, [args] * 2) as stack:
        blind, _, _ = stack.run(hits)
    print(f"{len(trace)} prompts, {asked:.0f} tokens: reused by one worker {one:.0f}, by two with the router {two:.0f} "
          f"({100 * two / one:.1f} %), in turn {blind:.0f} ({100 * blind / one:.1f} %); "
          f"the two were sent {shares[0]:.0f} and {shares[1]:.0f}")
    if two < 0.9 * one:
        sys.exit("expected at least 90 %")
    if min(shares) == 0:
        sys.exit("expected both workers to work")


def overhead(worker, generate):
    """What the way through HTTP takes beside `generate`, at one client."""
    tokens, prompt = 1000, PROMPTS[0]

    def of_generate():
        command = [generate, "--cpu", "--temperature", "0", "-n", str(tokens), "--prompt", prompt]
        told = subprocess.run(command, check=True, capture_output=True).stderr.decode()
        count, seconds = re.search(r"decode: (\d+) tokens in ([\d.]+) s", told).groups()
        return 1000 * float(seconds) / int(count), int(count)

    async def of_http(client):
        start = time.perf_counter()
        _, times, _ = await chat(client, prompt, tokens, extra_body={"ignore_eos": True})
        return 1000 * (times[-1] - times[0]) / (tokens - 1), 1000 * (times[0] - start)

    async def main(stack):
        client, rounds = stack.client(), []
        await of_http(client)
        for _ in range(9):
            mine, count = of_generate()
            theirs, first = await of_http(client)
            rounds.append((mine, theirs, first, count))
        return rounds

    with Stack(worker, [["--cpu"]]) as stack:
        rounds = stack.run(main)
    # The least, as other programs only ever add to it.
    mine, theirs, first, _ = map(min, zip(*rounds))
    print(f"one client, {tokens} tokens, least of {len(rounds)}: generate {mine:.3f} ms a token (of {rounds[0][3]}), "
          f"HTTP {theirs:.3f}, so {theirs - mine:.3f} ms more; first token after {first:.1f} ms")
    if theirs - mine > 1:
        sys.exit("expected at most 1 ms more")
