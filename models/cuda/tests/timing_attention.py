"""Times of the attention kernels: `python3 cuda/check_attention.py --time`."""
import ctypes as C

import torch
from abi import OK, Heads, Sequences, Slots, ptr, stream
from abi_attention import AttentionParams, KvCache, PrepareParams
from timing import copy_rate, graph_us, span_us

LAYOUTS = {"16/2x256 (Qwen3-Next, Qwen3.5-35B-A3B)": (16, 2, 256), "16/4x256 (Qwen3.5-4B)": (16, 4, 256),
           "8/2x256 (Qwen3.5-0.8B)": (8, 2, 256)}
LENGTHS = (512, 2048, 8192, 32768)


class Work:
    """One layer's cache of `length` tokens a sequence, of which the last `tokens` are new, and a projection's rows."""

    def __init__(self, batch, length, heads, kv_heads, dim, tokens=1):
        self.shape = batch, length, heads, kv_heads, dim, tokens
        bf16 = dict(device="cuda", dtype=torch.bfloat16)
        self.x = torch.randn(batch * tokens, (2 * heads + 2 * kv_heads) * dim, **bf16)
        self.k = torch.empty(batch, kv_heads, length, dim, **bf16).normal_()
        self.v = torch.empty(batch, kv_heads, length, dim, **bf16).normal_()
        self.positions = torch.full((batch,), length - tokens, dtype=torch.int32, device="cuda")
        self.q, self.o = (torch.randn(batch * tokens, heads, dim, **bf16) for _ in range(2))
        self.weight = torch.zeros(dim, device="cuda")
        self.inv_freq = torch.full((dim // 8,), 0.01, device="cuda")

    def params(self, overlap=0, splits=0):
        batch, length, heads, kv_heads, dim, tokens = self.shape
        row = self.x.stride(0)
        at = lambda first, head: Heads(self.x.data_ptr() + 2 * first, tokens * row, row, head)
        dense = lambda x: Heads(x.data_ptr(), tokens * heads * dim, heads * dim, dim)
        cache = KvCache(ptr(self.k), ptr(self.v), Slots(None, batch, self.k.stride(0)), self.k.stride(1), dim, length)
        seqs = Sequences(None, batch, tokens, tokens, batch * tokens)
        prepare = PrepareParams(at(0, 2 * dim), at(2 * heads * dim, dim), at((2 * heads + kv_heads) * dim, dim),
                                dense(self.q), ptr(self.weight), ptr(self.weight), ptr(self.inv_freq), None,
                                ptr(self.positions), cache, seqs, heads, kv_heads, dim, dim // 4, 1, 1, overlap, 1e-6)
        attention = AttentionParams(dense(self.q), at(dim, 2 * dim), dense(self.o), ptr(self.positions), cache, None, 0,
                                    seqs, heads, kv_heads, dim, 1, 0, splits, overlap, dim ** -0.5)
        return prepare, attention

    def torch_call(self, causal=False):
        batch, _, heads, _, dim, tokens = self.shape
        q = self.q.view(batch, tokens, heads, dim).transpose(1, 2)
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v, is_causal=causal, enable_gqa=True)


def works(batch, length, heads, kv_heads, dim, tokens=1):
    """Enough of them to pass the L2 cache, and the bytes of keys and values that one reads."""
    nbytes = 4 * batch * length * kv_heads * dim
    count = 1 if nbytes > 5e8 else max(3, min(64, int(2.6e8 / nbytes) + 1))
    return [Work(batch, length, heads, kv_heads, dim, tokens) for _ in range(count)], nbytes


def calls(lib, all_works, which, overlap=0, splits=0):
    """A call each; they share one workspace, as the layers of a model do."""
    params = [w.params(overlap, splits) for w in all_works]
    size = C.c_int64(0)
    status = lib.gdn_attention_workspace(C.byref(params[0][1]), C.byref(size))
    assert status == OK, lib.gdn_status_string(status).decode()
    room = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")

    def make(prepare, attention):
        attention.workspace, attention.workspace_bytes = room.data_ptr() + -room.data_ptr() % 256, size.value

        def call(keep=room):
            status = OK
            if "prepare" in which:
                status = lib.gdn_attention_prepare(C.byref(prepare), stream())
            if "attention" in which:
                status = status or lib.gdn_attention(C.byref(attention), stream())
            assert status == OK, lib.gdn_status_string(status).decode()
        return call
    return [make(*p) for p in params]


def often(x):
    return x * max(1, 24 // len(x))


def times(lib):
    rate = copy_rate()
    print(f"\n{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s; bf16, one new token, cold L2. us: attention by "
          "CUPTI, with its combination; prepare by CUPTI; both in a graph, and overlapped; torch's attention alone by CUPTI")
    for name, (heads, kv_heads, dim) in LAYOUTS.items():
        print(f"\n{name}\n| B | length | floor | attention | GB/s | of copy | prepare | both, graph | overlapped | torch |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for batch in (1, 4, 16, 64):
            for length in LENGTHS:
                every, nbytes = works(batch, length, heads, kv_heads, dim)
                us = span_us(often(calls(lib, every, ("attention",))))
                prepare = span_us(often(calls(lib, every, ("prepare",))))
                both = [graph_us(often(calls(lib, every, ("prepare", "attention"), overlap))) for overlap in (0, 1)]
                try:
                    theirs = f"{span_us(often([w.torch_call() for w in every])):.2f}"
                except RuntimeError:
                    theirs = "-"
                print(f"| {batch} | {length} | {nbytes / rate * 1e6:.2f} | {us:.2f} | {nbytes / us / 1e3:.0f} | "
                      f"{nbytes / us / 1e-6 / rate * 100:.0f} % | {prepare:.2f} | {both[0]:.2f} | {both[1]:.2f} | {theirs} |",
                      flush=True)
                del every
                torch.cuda.empty_cache()
    times_tokens(lib, rate)
    times_splits(lib)


def times_tokens(lib, rate):
    print("\nseveral tokens (verification of drafts), 16/2x256, us of attention and share of the copy rate")
    for batch, length in ((1, 2048), (1, 32768), (16, 8192)):
        row = []
        for tokens in (1, 2, 4, 8, 16):
            every, nbytes = works(batch, length, 16, 2, 256, tokens)
            us = span_us(often(calls(lib, every, ("attention",))))
            row.append(f"T={tokens} {us:.2f} ({nbytes / us / 1e-6 / rate * 100:.0f} %)")
        print(f"  B={batch} length {length}: " + "   ".join(row), flush=True)


def times_prompts(lib):
    """Prompts from position 0: the kernel for few tokens (splits 1), the chooser's, and torch's."""
    print(f"\n{torch.cuda.get_device_name()}; bf16, one prompt from position 0; us (CUPTI) and TFLOP/s, four operations a value, "
          "query and key it sees")
    print("| layout | T | splits 1 | TFLOP/s | chosen | TFLOP/s | of splits 1 | torch | TFLOP/s |\n|---|---|---|---|---|---|---|---|---|")
    for heads, kv_heads, dim in ((16, 4, 256), (16, 2, 256), (32, 8, 128)):
        for tokens in (512, 2048, 8192, 32768):
            every = [Work(1, tokens, heads, kv_heads, dim, tokens) for _ in range(3 if tokens <= 8192 else 1)]
            count = {512: 24, 2048: 24, 8192: 9, 32768: 3}[tokens]
            flops = 4 * dim * heads * (tokens * (tokens + 1) // 2)
            us = [span_us((calls(lib, every, ("attention",), splits=splits) * count)[:count]) for splits in (1, 0)]
            try:
                us.append(span_us(([w.torch_call(causal=True) for w in every] * count)[:count]))
            except RuntimeError:
                us.append(float("nan"))
            rates = [flops / x / 1e6 for x in us]
            print(f"| {heads}/{kv_heads}x{dim} | {tokens} | {us[0]:.1f} | {rates[0]:.0f} | {us[1]:.1f} | {rates[1]:.0f} | "
                  f"{us[0] / us[1]:.2f} x | {us[2]:.1f} | {rates[2]:.0f} |", flush=True)
            del every
            torch.cuda.empty_cache()


def times_splits(lib):
    """What the chooser has to find."""
    print("\nsplits, 16/2x256, us of attention; the first is the chooser's")
    for batch, length in ((1, 512), (1, 2048), (1, 8192), (1, 32768), (4, 2048), (4, 8192), (16, 8192), (64, 2048)):
        every, _ = works(batch, length, 16, 2, 256)
        row = [f"{splits or 'auto'}: {span_us(often(calls(lib, every, ('attention',), splits=splits))):.2f}"
               for splits in (0, 1, 2, 4, 8, 16, 33, 66, 132, 256)]
        print(f"  B={batch} length {length}: " + "   ".join(row), flush=True)
