"""A frontend and its workers on this machine, as processes of a test."""

import asyncio
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import openai

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODEL = "demo"


def free_port():
    """Below 32768: Dynamo reads DYN_SYSTEM_PORT as a number of 15 bits."""
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    sys.exit("no free port")


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


class Worker:
    def __init__(self, command, host, env, log):
        # The port of health and metrics.
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        env = env | {"DYN_SYSTEM_PORT": str(self.port), "DYN_SYSTEM_HOST": host}
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def metric(self, name, label=""):
        """The sum of a family over its labels, or over those lines that have this one."""
        lines = get(f"{self.url}/metrics").splitlines()
        name = name if name.startswith("dynamo_") else f"candle_gdn_{name}"
        lines = [line for line in lines if re.match(rf"{name}[{{ ]", line) and label in line]
        values = [line.rsplit(" ", 1)[1] for line in lines]
        if not values:
            sys.exit(f"no metric {name}")
        return sum(map(float, values))

    def kill(self):
        self.process.kill()
        self.process.wait()


class Stack:
    """`with Stack(...) as stack:` is a frontend that serves."""

    def __init__(self, binary, workers, frontend_args=()):
        """`workers` has the arguments of each."""
        self.binary, self.arguments, self.frontend_args = binary, workers, frontend_args
        self.workers, self.clients = [], []

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="candle-gdn-dynamo-")
        folder = pathlib.Path(self.folder.name)
        plane = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_FILE_KV": str(folder / "discovery")}
        # Processes find each other on this machine, whatever its network is.
        self.env = os.environ | plane | {"DYN_LOG": os.environ.get("DYN_LOG", "warn"), "NO_PROXY": "*"}
        self.log_path = folder / "log"
        self.log = open(self.log_path, "wb")
        http = str(free_port())
        prefix, host, env = self.place(0)
        self.url = f"http://{host}:{http}"
        frontend = [sys.executable, "-m", "dynamo.frontend", "--http-host", host, "--http-port", http]
        command = [*prefix, *frontend, *self.frontend_args]
        self.frontend = subprocess.Popen(command, env=self.env | env, stdout=self.log, stderr=self.log)
        try:
            for number, arguments in enumerate(self.arguments, 1):
                prefix, host, env = self.place(number)
                command = [*prefix, self.binary, *arguments, "--transfer-host", host]
                self.workers.append(Worker(command, host, self.env | env, self.log))
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def place(self, number):
        """Where a process runs, the frontend being number 0: what starts it there, its address, its variables."""
        return [], "127.0.0.1", {}

    def wait(self):
        """Until all workers are known."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for process in [self.frontend, *(worker.process for worker in self.workers)]:
                if process.poll() is not None:
                    sys.exit(f"a process has ended: {process.args}\n{self.log_path.read_text()}")
            try:
                instances = json.loads(get(f"{self.url}/health")).get("instances", [])
                serving = [instance for instance in instances if instance.get("endpoint") == "generate"]
                models = json.loads(get(f"{self.url}/v1/models"))["data"]
                if models and len(serving) >= len(self.workers):
                    return
            except OSError:
                pass
            time.sleep(0.2)
        sys.exit(f"no model after two minutes\n{self.log_path.read_text()}")

    def client(self):
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)
        self.clients.append(client)
        return client

    def run(self, main, *args):
        """What `main(self, *args)` does, and then its clients are closed."""
        async def closing():
            try:
                return await main(self, *args)
            finally:
                while self.clients:
                    await self.clients.pop().close()

        return asyncio.run(closing())

    def rss(self):
        """MiB of the workers, and of the frontend."""
        def of(process):
            text = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024

        return sum(of(worker.process) for worker in self.workers), of(self.frontend)

    def __exit__(self, *_):
        for process in [*(worker.process for worker in self.workers), self.frontend]:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.log.close()
        if os.environ.get("SHOW_LOG"):
            print(self.log_path.read_text())
        self.folder.cleanup()


async def chat(client, content, tokens, stream=True, began=None, **options):
    """The text of an answer, and when its parts came. The event `began` tells of the first one."""
    options = {"temperature": 0, **options}
    messages = [{"role": "user", "content": content}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=tokens, stream=stream, **options
    )
    if not stream:
        return answer.choices[0].message.content, [], answer.usage
    text, times = "", []
    async for part in answer:
        if part.choices and part.choices[0].delta.content:
            text += part.choices[0].delta.content
            times.append(time.perf_counter())
            if began:
                began.set()
    return text, times, None
