"""Tests of the contenders without a GPU, by host code of the interfaces that they call: `python3 -m unittest discover
benches/peers`. Needs torch."""
import ctypes as C
import math
import os
import sys
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(os.path.dirname(HERE)), "cuda", "tests")]

try:
    import torch
except ImportError as e:
    raise unittest.SkipTest(f"{e}: nothing here runs without it")
import abi
import child
import clocks
import contenders
import data
import reference
from workloads import DIM, Workload

torch.set_num_threads(1)      # the tensors are small
BF16 = torch.bfloat16


def work(lens, hk=1, hv=2, suite="prefill", decode=False, **kw):
    return Workload(suite, f"{hk}/{hv} test", hk, hv, tuple(lens), decode, **kw)


def by_tokens(q, k, v, a, b, a_log, dt_bias, state, lens, options):
    """The definition, a sequence at a time; packed inputs and raw gates. `options`: l2norm, eps, scale, beta_scale."""
    o, states, start = [], [], 0
    for n, length in enumerate(lens):
        rows = (x[None, start:start + length] for x in (q, k, v, a, b))
        y, s = reference.rule(*rows, a_log, dt_bias, state[n:n + 1].double(), torch.tensor([length]), *options)
        o, states, start = [*o, y[0]], [*states, s], start + length
    return torch.cat(o), torch.cat(states)


def tensor(address, shape, strides=None, dtype=BF16):
    """The tensor that lies at an address; strides in elements, by default of a contiguous one."""
    strides = strides or [math.prod(shape[i + 1:]) for i in range(len(shape))]
    elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
    memory = (C.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class HostKernels:
    """Our kernels on the host: the formulas of reference.py at the addresses that the structs of gdn.h hold. Functions of
    the C ABI that nothing here calls are missing."""

    def __getattribute__(self, name):
        """A kernel takes its parameters' struct, and returns nothing where it succeeds."""
        kernel = object.__getattribute__(self, name)
        if not name.startswith("gdn_") or name == "gdn_status_string":
            return kernel
        return lambda p, last: kernel(p._obj, getattr(last, "_obj", None)) or abi.OK

    def gdn_status_string(self, status):
        return b"no such kernel" if status == abi.BAD_ALGO else b"bad"

    def heads(self, x, p, heads, dim):
        """[sequence, token, head, dim]; packed sequences are one."""
        n, tokens = (1, p.seqs.total_tokens) if p.seqs.cu_seqlens else (p.seqs.num_seqs, p.seqs.tokens_per_seq)
        return tensor(x.ptr, (n, tokens, heads, dim), (x.seq_stride, x.token_stride, x.head_stride, 1))

    def rule(self, p, q, k, v):
        """o; the sequences one after the other, packed or not. Writes the states."""
        lens = [v.shape[1]] * v.shape[0]
        if p.seqs.cu_seqlens:
            lens = tensor(p.seqs.cu_seqlens, (p.seqs.num_seqs + 1,), dtype=torch.int32).diff().tolist()
        assert max(lens) <= p.seqs.max_tokens_per_seq and p.in_slots.num_slots == len(lens)
        assert p.io_dtype == p.gate_dtype == abi.BF16 and p.state_dtype == abi.F32 and not p.in_slots.slots and not p.out_slots.slots
        gates = [self.heads(x, p, p.num_v_heads, 1)[..., 0] for x in (p.a, p.b)]
        constants = [tensor(x, (p.num_v_heads,), dtype=torch.float32) for x in (p.a_log, p.dt_bias)]
        before, after = (tensor(x, (len(lens), p.num_v_heads, p.head_v, p.head_k), (slots.slot_stride, p.head_v * p.head_k, p.head_k, 1),
                                torch.float32) for x, slots in ((p.state_in, p.in_slots), (p.state_out, p.out_slots)))
        inputs = [x.double().flatten(0, 1) for x in (q, k, v, *gates)]
        o, state = by_tokens(*inputs, *constants, before, lens, (p.l2norm, p.l2_eps, p.scale, p.beta_scale))
        after.copy_(state)
        return o.view(v.shape)

    def gdn_rule_workspace(self, p, size):
        if p.algo == abi.RECURRENT:
            return abi.BAD_ALGO
        size.value = self.workspace(p)

    def workspace(self, p):
        return 8 * p.seqs.total_tokens if p.seqs.total_tokens > p.seqs.num_seqs else 0

    def gdn_rule(self, p, _stream):
        if p.algo == abi.RECURRENT:
            return abi.BAD_ALGO
        if self.workspace(p):
            assert p.workspace and p.workspace % 256 == 0 and p.workspace_bytes >= self.workspace(p)
            C.memset(p.workspace, 0, self.workspace(p))
        q, k, v, o = (self.heads(x, p, heads, dim) for x, heads, dim in (
            (p.q, p.num_k_heads, p.head_k), (p.k, p.num_k_heads, p.head_k), (p.v, p.num_v_heads, p.head_v), (p.o, p.num_v_heads, p.head_v)))
        o.copy_(self.rule(p, q, k, v))

    def conv(self, p, past, kept, weight, width, channels):
        """y [sequence, token, channel]. `past`, `kept`: address and stride."""
        assert p.io_dtype == abi.BF16
        x = self.heads(p.x, p, 1, channels)[:, :, 0]
        past, kept = (tensor(address, (x.shape[0], width - 1, channels), (stride, channels, 1)) for address, stride in (past, kept))
        y, last = reference.conv(past, x, tensor(weight, (channels, width)))
        kept.copy_(last.clone())
        return y

    def gdn_conv(self, p, _stream):
        assert p.weight_dtype == abi.BF16 and p.silu
        past, kept = (p.state_in, p.in_slots.slot_stride), (p.state_out, p.out_slots.slot_stride)
        self.heads(p.y, p, 1, p.channels)[:, :, 0] = self.conv(p, past, kept, p.weight, p.width, p.channels)

    def gdn_norm(self, p, _stream):
        assert p.io_dtype == p.weight_dtype == abi.BF16 and not p.sigmoid
        x, z, out = (tensor(x.ptr, (p.tokens, p.heads, p.head_v), (x.token_stride, x.head_stride, 1)) for x in (p.x, p.z, p.out))
        out.copy_(reference.gated_norm(x, z, tensor(p.weight, (p.head_v,))))

    def gdn_linear(self, p, _stream):
        assert p.dtype == abi.BF16
        x, w, y = (tensor(x, shape, (stride, 1)) for x, shape, stride in (
            (p.x, (p.rows, p.inputs), p.x_stride), (p.w, (p.outputs, p.inputs), p.w_stride), (p.y, (p.rows, p.outputs), p.y_stride)))
        y.copy_(reference.linear(x, w))

    def gdn_step(self, p, _stream):
        """The launches that it replaces, one after the other."""
        assert p.conv_dtype == p.norm_dtype == abi.BF16 and not p.sigmoid
        widths = [p.num_k_heads * p.head_k] * 2 + [p.num_v_heads * p.head_v]
        past, kept = (p.conv_in, p.conv_in_stride), (p.conv_out, p.conv_out_stride)
        y = self.conv(p, past, kept, p.conv_weight, p.conv_width, sum(widths)).to(BF16)
        o = self.rule(p, *(x.unflatten(-1, (-1, dim)) for x, dim in zip(y.split(widths, -1), (p.head_k, p.head_k, p.head_v)))).to(BF16)
        z, out = (self.heads(x, p, p.num_v_heads, p.head_v) for x in (p.z, p.out))
        out.copy_(reference.gated_norm(o, z, tensor(p.norm_weight, (p.head_v,))))


class Contenders(unittest.TestCase):
    def setUp(self):
        for patch in (mock.patch("abi.stream", lambda: None), mock.patch("abi.load", return_value=HostKernels()),
                      mock.patch("torch.cuda.synchronize")):
            patch.start()
            self.addCleanup(patch.stop)

    def errors(self, contender, w, variant):
        """What child.py would report."""
        case = child.case_of(contender, w, variant, 2)
        for call in case.calls:
            call()
        return child.errors(contender, w, case)

    def agree(self, contender, works, variant="", bounds=(3e-3, 1e-5)):
        for w in works:
            found, note = self.errors(contender, w, variant)
            for error, bound in zip(found.values(), bounds or contender.bounds(w, variant)):
                self.assertLess(error, bound, (w, variant))
            self.assertEqual(note, "passes the contest's tolerance" if w.suite.startswith("contest") else "")

    SHAPES = [work([5, 70, 1], 1, 2), work([30], 2, 2), work([7, 9], 4, 8, "contest-prefill", l2norm=False)]
    DECODES = [work([1] * 3, 2, 4, "decode", True), work([1] * 2, 4, 8, "contest-decode", True, l2norm=False)]
    # The real layer's width, 16/32, so that the projection's rows are what they are.
    LAYERS = [work([1, 1], 16, 32, "layer", True), work([3], 16, 32, "layer")]

    def test_ours(self):
        crate = contenders.load("candle-gdn")("", "cpu")
        self.assertRegex(crate.version, r"^\d+\.\d+")
        self.agree(crate, [*self.SHAPES, *self.DECODES, work([64], 2, 2)], "auto", (4e-3, 1e-6))
        for w in (*self.LAYERS, work([17], 16, 32, "layer")):
            for variant in ("auto", "recurrent_128", *(v for v in contenders.APART if contenders.takes("", v, w))):
                self.agree(crate, [w], variant, (2e-2, 2e-2))
        with self.assertRaisesRegex(RuntimeError, "gdn_rule: no such kernel"):
            self.errors(crate, work([4]), "recurrent")
        with mock.patch.object(crate, "launch"):     # outputs that nothing wrote are found
            self.assertEqual(self.errors(crate, work([4]), "auto")[0], {"o": math.inf, "state": math.inf})

    def test_child_process(self):
        """child.run as it is, with the GPU's part replaced."""
        crate, lines = contenders.load("candle-gdn")("", "cpu"), []
        again = work([4], 1, 2, "contest-prefill", l2norm=False, draw=2, timed=False)
        items = [{"workload": w.to_json(), "variant": v}
                 for w, v in ((work([4]), "auto"), (work([4]), "recurrent"), (again, "auto"))]
        props = types.SimpleNamespace(L2_cache_size=1 << 20)
        with mock.patch("torch.cuda.empty_cache"), mock.patch("torch.cuda.get_device_properties", return_value=props), \
                mock.patch.object(contenders, "load", return_value=lambda lib: crate), \
                mock.patch.object(clocks, "measure", return_value={"gpu": clocks.spread([1.0]), "note": ""}):
            spec = {"contender": "candle-gdn", "lib": "", "task": "time", "items": items}
            self.assertEqual(child.run(spec, lambda **line: lines.append(line)), 0)
        self.assertEqual(lines[0], {"info": {"version": crate.version}})
        rows = [line for line in lines if "row" in line]
        self.assertEqual([(r["row"], r.get("gpu", {}).get("median"), r["note"]) for r in rows], [
            (0, 1.0, ""), (1, None, "failed: RuntimeError: gdn_rule: no such kernel"), (2, None, "passes the contest's tolerance")])

    # ---- the peers' interfaces, as their documentation has them: layouts, and what is computed beforehand ----

    def modules(self, **found):
        """Modules of these contents; a__b is a.b."""
        made = {}
        for name, content in found.items():
            names = name.split("__")
            for i in range(1, len(names) + 1):
                made.setdefault(".".join(names[:i]), types.ModuleType(".".join(names[:i])))
            vars(made[".".join(names)]).update(content)
        return mock.patch.dict(sys.modules, made)

    def rule(self, q, k, v, g, beta, state, lens, scale):
        """Of ready inputs, packed: o in bf16, states in f32."""
        o, s = reference.packed_chunks(q, k, v, g, beta, state, lens, scale)
        return o.bfloat16(), s.float()

    def raw_rule(self, q, k, v, a, b, state, lens, scale, l2norm, a_log, dt_bias):
        q, k = (reference.unit(x) if l2norm else x for x in (q, k))
        return self.rule(q, k, v, reference.log_decay(a, a_log, dt_bias), b.double().sigmoid(), state, lens, scale or DIM ** -0.5)

    def chunk(self, q, k, v, g, beta, scale, initial_state, cu_seqlens):
        """The interface that fla and FlashQLA share: batch 1, states [sequence, HV, K, V]."""
        o, s = self.rule(q[0], k[0], v[0], g[0], beta[0], initial_state.mT, cu_seqlens.diff().tolist(), scale)
        return o[None], s.mT.contiguous()

    def test_flashinfer(self):
        splits = []

        def decode(q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True):
            self.assertEqual(q.shape[1], 1)
            o, s = self.raw_rule(*(x[:, 0] for x in (q, k, v, a, b)), state, [1] * q.shape[0], scale, use_qk_l2norm, A_log, dt_bias)
            output.copy_(o[:, None])
            state.copy_(s)

        def prefill(q, k, v, g, beta, scale, initial_state, output_final_state, cu, output=None, output_state=None, use_cp="auto",
                    max_seqlen=None):
            lens = cu.diff().tolist()
            self.assertEqual((cu.dtype, max_seqlen, g.dtype), (torch.int32, max(lens), torch.float32))
            splits.append(str(use_cp))
            for out, x in zip((output, output_state), self.rule(q, k, v, g.double().log(), beta, initial_state, lens, scale)):
                out.copy_(x)

        with self.modules(flashinfer__gdn_decode={"gated_delta_rule_decode_pretranspose": decode},
                          flashinfer__gdn_prefill={"chunk_gated_delta_rule": prefill}), \
                mock.patch("contenders.peer_flashinfer.version", return_value="0"):
            contender = contenders.load("flashinfer")(None, "cpu")
            self.agree(contender, self.DECODES)
            self.agree(contender, self.SHAPES, "cp")
            self.agree(contender, self.SHAPES, "nocp")
        self.assertEqual(set(splits), {"auto", "False"})

    def test_flashqla(self):
        def prefill(q, k, v, g, beta, scale=None, initial_state=None, cu_seqlens=None, output_final_state=True, output_h=False):
            o, s = self.chunk(q, k, v, g, beta, scale, initial_state, cu_seqlens)
            return g, None, o, None, s, None
        with self.modules(flash_qla={"chunk_gated_delta_rule_fwd": prefill}), \
                mock.patch("contenders.peer_flashqla.version", return_value="0"):
            self.agree(contenders.load("flashqla")(None, "cpu"), self.SHAPES)

    def test_fla(self):
        def chunk(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, use_gate_in_kernel=False,
                  A_log=None, dt_bias=None, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, state_v_first=False):
            self.assertTrue(output_final_state and use_gate_in_kernel == use_beta_sigmoid_in_kernel == state_v_first)
            if not use_gate_in_kernel:
                return self.chunk(q, k, v, g, beta, scale, initial_state, cu_seqlens)
            n, tokens = q.shape[:2]
            o, s = self.raw_rule(*(x.flatten(0, 1) for x in (q, k, v, g, beta)), initial_state, [tokens] * n, scale,
                                 use_qk_l2norm_in_kernel, A_log, dt_bias)
            return o.unflatten(0, (n, tokens)), s

        def recurrent(q, k, v, g=None, gk=None, gv=None, beta=None, **options):
            self.assertTrue(gk is gv is None)
            return chunk(q, k, v, g, beta, **options)

        def convolve(past, weight):
            t = past.shape[1] - 3
            return torch.nn.functional.silu(sum(past[:, j:j + t].double() * weight[:, j].double() for j in range(4))).bfloat16()

        def conv(x, weight, initial_state=None, output_final_state=False, activation=None):
            past = torch.cat([initial_state[:, :, 1:].mT, x], 1)
            return convolve(past, weight), past[:, -4:].mT

        def conv_update(x, cache, weight=None, activation=None):
            past = torch.cat([cache[:, :, 1:].mT, x], 1)
            cache.copy_(past.mT)
            return convolve(past, weight), cache

        def norm(x, g, weight, bias, activation="swish", eps=1e-6):
            x, g = x.double(), g.double()
            return (x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double() * g * g.sigmoid()).bfloat16()

        import contenders.peer_fla as peer
        self.assertEqual(os.environ["FLA_FLASH_QLA"], "0")
        with self.modules(fla__ops__gated_delta_rule={"chunk_gated_delta_rule": chunk, "fused_recurrent_gated_delta_rule": recurrent},
                          fla__modules__causal_conv1d={"causal_conv1d": conv, "causal_conv1d_update": conv_update},
                          fla__modules__norm__fused_norm_gate={"rms_norm_gated": norm}), \
                mock.patch("contenders.peer_fla.version", return_value="0"):
            contender = contenders.load("fla")(None, "cpu")
            for variant in ("chunk", "recurrent"):
                self.agree(contender, self.SHAPES, variant)
            self.agree(contender, self.LAYERS, "chunk", None)
            self.agree(contender, [*self.DECODES, *self.LAYERS, work([1], 16, 32, "layer", True)], "recurrent", None)
        with self.modules(flash_qla={}), self.assertRaisesRegex(RuntimeError, "FlashQLA"):     # it must run its own kernels
            peer.Fla.own(None)

    def test_torch(self):
        """The real operations, on the host; compiled too, with a compiler that does nothing."""
        decodes = [work([1] * 3, 2, 4, "decode", True), work([1], 3, 3, "decode", True)]
        prefills = [work([n] * 2, 2, 4) for n in (1, 63, 64, 130)]
        compiled = []

        def compile(function, dynamic, mode):
            compiled.append((function.__name__, dynamic, mode))
            return function
        with mock.patch("torch.compile", compile):
            for name, suite in (("torch", "decode"), ("torch-compile", "decode")):
                contender = contenders.load(name)("", "cpu")
                for variant in contenders.variants(name, suite):
                    self.agree(contender, decodes + prefills, variant)
                    self.assertEqual(torch.backends.cuda.matmul.allow_tf32, bool(variant))
                for variant in contenders.variants(name, "layer"):
                    self.agree(contender, self.LAYERS, variant, None)
        tuned = "max-autotune-no-cudagraphs"
        self.assertEqual(compiled[:4], [("decode", False, "default"), ("prefill", False, "default"), ("decode", False, tuned),
                                        ("prefill", False, tuned)])
        contender = contenders.load("torch")(None, "cpu")
        for variant in ("one", "two", "six"):
            self.agree(contender, [work([3], 16, 32, "projections")], variant, (4e-3,))
        for w in (work([1] * 2, 1, 2, "decode", True), work([5, 5], 1, 2)):     # a call computes its own set
            case = contender.rule_case(w, "", 2)
            case.calls[1]()
            with self.assertRaises(KeyError):
                case.result()

    def test_gradients(self):
        """Those of torch's operations are autograd's; a wrong one is seen, and each is checked."""
        import gradients
        with mock.patch.object(gradients, "CHECKED", work([30, 70], suite="backward")):
            torch_ops = contenders.load("torch")(None, "cpu")
            found, note = child.errors(torch_ops, gradients.CHECKED, None)
            self.assertEqual((list(found), note), ([f"d{name}" for name in gradients.RAW], ""))
            self.assertLess(max(found.values()), 3e-3, found)
            exact = gradients.exact
            with mock.patch.object(gradients, "exact", lambda *args: [1.1 * x for x in exact(*args)]):
                wrong = gradients.errors(torch_ops, gradients.CHECKED, "")
            self.assertTrue(all(error > 5e-2 for error in wrong.values()), wrong)

    def test_same_numbers_for_all(self):
        w = work([3, 4])
        a, b = data.draw(w, 3, "cpu"), data.draw(w, 3, "cpu")
        self.assertTrue(torch.equal(a.q, b.q) and torch.equal(a.state, b.state) and torch.equal(a.dt_bias, b.dt_bias))
        self.assertFalse(torch.equal(a.q[0], a.q[1]))


if __name__ == "__main__":
    unittest.main()
