"""Several machines, as far as one can stand for them: a network namespace each, with an address, a loopback and folders of its own.

Needs root, for the namespaces, and etcd, by which the processes find each other."""

import asyncio
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import checks
from stack import ROOT, Stack, chat

# What the frontend must not need: it gets tokenizer and chat template from a worker.
CHECKPOINT = ROOT / "examples/generate/demo"


def ip(*args):
    subprocess.run(["ip", *map(str, args)], check=True)


class Machines(Stack):
    """Frontend and etcd on the first machine, a worker on each further one. The test itself is beside them."""

    def __enter__(self):
        if os.getuid() or not shutil.which("etcd"):
            sys.exit("machines: expected root, for network namespaces, and etcd")
        self.net = f"10.213.{random.randrange(256)}"
        self.bridge = f"gdn{os.getpid()}"
        self.names = [f"{self.bridge}-{number}" for number in range(1 + len(self.arguments))]
        try:
            ip("link", "add", self.bridge, "type", "bridge")
            ip("addr", "add", f"{self.net}.254/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for number, name in enumerate(self.names):
                ip("netns", "add", name)
                ip("link", "add", f"{self.bridge}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", f"{self.bridge}v{number}", "master", self.bridge, "up")
                ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
                for link in ("lo", "eth0"):
                    ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "route", "add", "default", "via", f"{self.net}.254")
            self.start_etcd()
            return super().__enter__()
        except BaseException:
            self.remove()
            raise

    def address(self, number):
        return f"{self.net}.{1 + number}"

    def start_etcd(self):
        self.etcd_folder = tempfile.TemporaryDirectory(prefix="candle-gdn-etcd-")
        url = f"http://{self.address(0)}:2379"
        command = ["ip", "netns", "exec", self.names[0], "etcd", "--data-dir", self.etcd_folder.name]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--log-level", "error"]
        self.etcd = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(100):
            try:
                opener.open(f"{url}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.1)
        sys.exit("etcd does not start")

    def place(self, number):
        home = pathlib.Path(self.folder.name) / str(number)
        home.mkdir()
        env = {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": f"http://{self.address(0)}:2379"}
        env |= {"HOME": str(home), "TMPDIR": str(home)}
        prefix = ["ip", "netns", "exec", self.names[number]]
        if number == 0:
            # Without it a machine that falls silent is waited for.
            env["DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS"] = "5"
            prefix += ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(CHECKPOINT)]
        return prefix, self.address(number), env

    def __exit__(self, *args):
        super().__exit__(*args)
        self.remove()

    def remove(self):
        if hasattr(self, "etcd"):
            self.etcd.kill()
            self.etcd.wait()
            self.etcd_folder.cleanup()
        # Links by their names: they would outlive a namespace for a moment.
        links = [f"{self.bridge}v{number}" for number in range(len(self.names))]
        for what in [*(["link", "del", link] for link in links), *(["netns", "del", name] for name in self.names),
                     ["link", "del", self.bridge]]:
            subprocess.run(["ip", *what], stderr=subprocess.DEVNULL)


def silence(worker):
    """A machine falls off the network, which says nothing to those who wait for it: its requests end on the other one."""
    prompts = [f"{prompt} {n}" for n in range(3) for prompt in checks.PROMPTS]

    async def main(stack):
        want = await checks.solo(stack, prompts, 600)
        client = stack.client()
        options = {"extra_body": {"ignore_eos": True}}
        tasks = [asyncio.create_task(chat(client, prompt, 600, **options)) for prompt in prompts]
        while min(one.metric("requests_running") for one in stack.workers) < 3:
            await asyncio.sleep(0.01)
        lost, start = stack.workers[0].metric("requests_running"), time.monotonic()
        ip("link", "set", f"{stack.bridge}v1", "down")
        for task, prompt in zip(tasks, prompts):
            checks.same((await task)[0], want[prompt], f"{prompt!r} with a machine gone")
        return lost, time.monotonic() - start

    with Machines(worker, [["--cpu"]] * 2, ["--migration-limit", "3"]) as stack:
        lost, seconds = stack.run(main)
    print(f"{len(prompts)} answers are whole {seconds:.0f} s after a machine was off the network that had {lost:.0f} of them")


def machines(worker, generate):
    """What several workers do on one machine they do on several."""
    for check in (checks.migration, checks.handoff, checks.routing):
        check(worker, generate, Machines)
    silence(worker)
