#!/usr/bin/env python3
"""Every launcher has a shape for every supported card: the kernels that cargo has compiled, over fake_cudart.c, in the sizes of the
published models and at their limits. Needs the static libraries of a build with `--features cuda` and CUDA's headers, no GPU."""
import ctypes as C
import glob
import itertools
import os
import subprocess
import sys
import tempfile
import unittest

import abi
from abi import ABI, CODES

HERE = os.path.dirname(os.path.abspath(__file__))
# Shared memory of a block, multiprocessors, and the code that runs: GeForce and A10, an A100, an H100 with the code of sm_80, an RTX 50
# with code of its own.
CARDS = [(101376, 82, 80), (166912, 108, 80), (232448, 132, 80), (101376, 170, 120)]
FAR = 1 << 40       # an address that nobody reads


def libraries():
    """The newest of each, without the profile's stamps."""
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(abi.CUDA, "..", "target"))
    newest = {}
    for path in glob.glob(os.path.join(target, "*", "build", "*", "out", "*", "libcandle_gdn*_cuda.a")):
        if "PROFILE" not in path.upper() and os.path.getmtime(path) > newest.get(os.path.basename(path), (0,))[0]:
            newest[os.path.basename(path)] = os.path.getmtime(path), path
    return [path for _, path in newest.values()]


def heads(count, dim, tokens):
    return dict(ptr=FAR, seq_stride=tokens * count * dim, token_stride=count * dim, head_stride=dim)


def struct(name, **fields):
    """A struct whose fields may be dictionaries of nested ones."""
    made = ABI.structs[name]()
    for field, value in fields.items():
        kind = dict(made._fields_)[field]
        setattr(made, field, struct(next(n for n, s in ABI.structs.items() if s is kind), **value) if isinstance(value, dict) else value)
    return made


def common(k_heads, v_heads, dim, seqs, tokens, io, state):
    channel_state = v_heads * dim[0] * dim[1]
    slots = dict(slots=None, num_slots=seqs, slot_stride=channel_state)
    return dict(a=heads(v_heads, 1, tokens), b=heads(v_heads, 1, tokens), a_log=FAR, dt_bias=FAR, state_in=FAR, state_out=FAR, in_slots=slots,
                out_slots=slots, seqs=dict(num_seqs=seqs, tokens_per_seq=tokens), num_k_heads=k_heads, num_v_heads=v_heads, head_k=dim[0],
                head_v=dim[1], io_dtype=CODES[io], gate_dtype=CODES[io], state_dtype=CODES[state], l2norm=1, l2_eps=1e-6, scale=1.0, beta_scale=1.0)


def layer(k_heads, v_heads, dim, tokens, io, overlap):
    channels = 2 * k_heads * dim[0] + v_heads * dim[1]
    of_z = heads(v_heads, dim[1], tokens)
    return dict(x=dict(ptr=FAR, seq_stride=tokens * channels, token_stride=channels, head_stride=0), z=of_z, out=of_z, conv_weight=FAR,
                norm_weight=FAR, conv_dtype=CODES[io], norm_dtype=CODES["f32"], conv_width=4, norm_eps=1e-6, overlap=overlap)


MODELS = [(16, 16), (16, 32), (16, 48), (16, 64), (30, 30), (4, 8), (1, 8)]      # key and value heads


def rules():
    for (k, v), dim, seqs, tokens, io, state in itertools.product(MODELS, [(64, 64), (96, 192), (128, 128), (192, 192), (256, 256)], [1, 64],
                                                                  [1, 8, 64, 4096], CODES, ["f32", "bf16"]):
        yield "gdn_rule", struct("gdn_rule_params", common=common(k, v, dim, seqs, tokens, io, state), q=heads(k, dim[0], tokens),
                                 k=heads(k, dim[0], tokens), v=heads(v, dim[1], tokens), o=heads(v, dim[1], tokens))


def steps():
    for (k, v), dim, seqs, tokens, io, state in itertools.product(MODELS, [(128, 128), (96, 192)], [1, 16, 64], [1, 2, 4, 5, 8, 16], CODES, ["f32", "bf16"]):
        shared = dict(common=common(k, v, dim, seqs, tokens, io, state), layer=layer(k, v, dim, tokens, io, 1))
        channels = 2 * k * dim[0] + v * dim[1]
        if tokens <= 8 and v // k <= 4:     # the others are the three ops
            yield "gdn_step", struct("gdn_step_params", **shared, conv_in=FAR, conv_out=FAR, conv_in_stride=3 * channels, conv_out_stride=3 * channels)
        ring = dict(keys=FAR, updates=FAR, decays=FAR, spans=FAR, keys_stride=k * 32 * dim[0], updates_stride=v * 32 * dim[1], decays_stride=v * 32,
                    capacity=32, max_entries=16)
        yield "gdn_ring_step", struct("gdn_ring_step_params", **shared, ring=ring, inputs=FAR, inputs_stride=32 * channels)
        yield "gdn_ring_flush", struct("gdn_ring_flush_params", common=shared["common"], ring=ring)


SIZES = [(1024, 3072), (2048, 12352), (2560, 9216), (2560, 248320), (3072, 1024), (4096, 12288), (5120, 17408), (9216, 2560), (17408, 5120), (64, 16)]


def products():
    for (inputs, outputs), rows, io in itertools.product(SIZES, [1, 2, 5, 8, 9, 16, 17, 32], ["bf16", "f16"]):
        fields = dict(x=FAR, w=FAR, y=FAR, x_stride=inputs, w_stride=inputs, y_stride=outputs, rows=rows, inputs=inputs, outputs=outputs, dtype=CODES[io])
        yield "gdn_linear", struct("gdn_linear_params", **fields, overlap=1)
        scales = dict(ptr=FAR, stride=(inputs + 127) // 128, rows=128)
        yield "gdn_scaled", struct("gdn_scaled_params", **fields, scales=scales)
        if rows <= 8:
            yield "gdn_scaled", struct("gdn_scaled_params", **fields, swiglu=1)
    for (inputs, outputs), rows, kind, io in itertools.product([*SIZES, (18432, 5120), (26624, 1024)], [1, 2, 3, 4, 6, 8, 9, 16, 17, 33, 64, 65, 128], [0, 1, 2], CODES):
        if inputs % 256 or inputs > (18432 if kind == 2 else 26624):
            continue
        part = (ABI.structs["gdn_quantized_part"] * 1)(struct("gdn_quantized_part", w=FAR, type=kind, outputs=outputs))
        p = struct("gdn_quantized_params", x=FAR, parts=C.addressof(part), y=FAR, x_stride=inputs, y_stride=outputs, rows=rows, num_parts=1,
                   inputs=inputs, dtype=CODES[io], overlap=1)
        p.room = part      # keeps it alive
        yield "gdn_quantized", p
        if io != "f32":
            yield "gdn_quantized_many", p


def experts():
    for (hidden, inner, shared), tokens, io in itertools.product([(2048, 512, 512), (2048, 512, 0), (3072, 1024, 1024), (4096, 1024, 1024), (1024, 256, 256)],
                                                                 [1, 2, 3, 6, 16, 17, 48, 49, 64, 65, 128, 129, 512, 2048, 8192], ["bf16", "f16"]):
        fields = dict(x=FAR, router=FAR, gate_up=FAR, down=FAR, shared_gate_up=FAR, shared_down=FAR, y=FAR, x_stride=hidden, y_stride=hidden,
                      tokens=tokens, hidden=hidden, num_experts=256, top_k=8, inner=inner, shared_inner=shared, io_dtype=CODES[io], router_parts=3, overlap=1)
        yield "gdn_moe", struct("gdn_moe_params", **fields)
        scales = dict(ptr=FAR, stride=hidden // 128, rows=128)
        yield "gdn_moe", struct("gdn_moe_params", **fields, gate_up_scales=scales, down_scales=scales, shared_gate_up_scales=scales, shared_down_scales=scales)
        if tokens <= ABI.constants["GDN_MOE_PACKED_TOKENS"] and tokens * hidden <= ABI.constants["GDN_MOE_PACKED_INPUTS"]:
            for kind in range(3):
                types = {name: kind for name in ("gate_up_type", "down_type", "shared_gate_up_type", "shared_down_type")}
                yield "gdn_moe", struct("gdn_moe_params", **fields, quantized=1, **types)


def gradients():
    for (k, v), dim, seqs, tokens, io in itertools.product(MODELS, [(64, 64), (96, 192), (128, 128), (256, 256), (40, 24)], [1, 64], [0, 1, 64, 4096], CODES):
        shared = common(k, v, dim, seqs, tokens, io, "f32")
        shared.update(gate_dtype=CODES["f32"])
        inputs = dict(q=heads(k, dim[0], tokens), k=heads(k, dim[0], tokens), v=heads(v, dim[1], tokens))
        gates = heads(v, 1, tokens)
        for recompute in (0, 1):
            yield "gdn_rule_backward", struct("gdn_rule_backward_params", common=shared, **inputs, **{f"d_{name}": x for name, x in inputs.items()},
                                              d_o=heads(v, dim[1], tokens), d_log_decay=gates, d_beta=gates, d_state_in=FAR, recompute=recompute)
        yield "gdn_norm_backward", struct("gdn_norm_backward_params", tokens=seqs * tokens, heads=v, head_v=dim[1], io_dtype=CODES[io], weight=FAR, d_weight=FAR,
                                          **{name: heads(v, dim[1], tokens) for name in ("x", "z", "d_out", "d_x", "d_z")})
        fields = dict(a=gates, b=gates, log_decay=gates, beta=gates, a_log=FAR, dt_bias=FAR, num_seqs=seqs, tokens_per_seq=tokens, heads=v, gate_dtype=CODES[io])
        yield "gdn_ready_gates", struct("gdn_ready_gates_params", **fields)
        yield "gdn_ready_gates_backward", struct("gdn_ready_gates_backward_params", gates=fields, d_log_decay=gates, d_beta=gates, d_a=gates, d_b=gates,
                                                 d_a_log=FAR, d_dt_bias=FAR)
        channels = 2 * k * dim[0] + v * dim[1]
        for width in (2, 4, 8):
            rows = heads(1, channels, tokens)
            yield "gdn_conv_backward", struct("gdn_conv_backward_params", x=rows, d_y=rows, d_x=rows, weight=FAR, state_in=FAR, d_weight=FAR, d_state_in=FAR,
                                              seqs=shared["seqs"], channels=channels, width=width, io_dtype=CODES[io], weight_dtype=CODES["f32"])


def attentions():
    for (q, kv, dim), seqs, tokens, io, window in itertools.product([(16, 2, 256), (24, 4, 256), (32, 2, 256), (16, 8, 128), (8, 8, 64)], [1, 64],
                                                                    [1, 4, 16, 17, 512, 4096], CODES, [0, 512]):
        capacity = 8192 if not window else window + tokens
        slots, seqs_of = dict(num_slots=seqs, slot_stride=kv * capacity * dim), dict(num_seqs=seqs, tokens_per_seq=tokens)
        cache = dict(k=FAR, v=FAR, slots=slots, head_stride=capacity * dim, token_stride=dim, capacity=capacity, window=window)
        shared = dict(positions=FAR, cache=cache, seqs=seqs_of, num_heads=q, num_kv_heads=kv, head_dim=dim, io_dtype=CODES[io], overlap=1)
        rows, few = heads(q, dim, tokens), heads(kv, dim, tokens)
        yield "gdn_attention", struct("gdn_attention_params", q=rows, gate=rows, o=rows, scale=0.1, **shared)
        yield "gdn_attention_prepare", struct("gdn_attention_prepare_params", q=rows, k=few, v=few, q_out=rows, q_weight=FAR, k_weight=FAR, inv_freq=FAR,
                                              rotary_dim=dim // 4, eps=1e-6, **shared)
        yield "gdn_advance", struct("gdn_advance_params", positions=FAR, slots=slots, seqs=seqs_of, overlap=1)


def rows_of_models():
    """What stands between the products of a model, and what ends a step."""
    for dim, rows, io in itertools.product([1024, 2048, 2560, 5120], [1, 8, 64, 8192], CODES):
        fields = dict(rows=rows, dtype=CODES[io], overlap=1)
        yield "gdn_residual", struct("gdn_residual_params", x=FAR, h=FAR, sum=FAR, y=FAR, weight=FAR, dim=dim, eps=1e-6,
                                     **{f"{name}_stride": dim for name in ("x", "h", "sum", "y")}, **fields)
        yield "gdn_swiglu", struct("gdn_swiglu_params", gate=FAR, up=FAR, out=FAR, columns=dim, **{f"{name}_stride": dim for name in ("gate", "up", "out")},
                                   **fields)
    for vocab, rows, io in itertools.product([1000, 151936, 248320], [1, 8, 64, 256], CODES):
        fields = dict(logits=FAR, ids=FAR, drawn=FAR, state=FAR, recent=FAR, logits_stride=vocab, rows=rows, vocab=vocab, history=64, dtype=CODES[io])
        yield "gdn_sampling", struct("gdn_sampling_params", kept=FAR, **fields)
        for name in ("gdn_logprobs_begin", "gdn_logprobs_end"):
            yield name, struct("gdn_logprobs_params", out=FAR, raw=FAR, parts=FAR, **fields)
    for seqs, tokens in itertools.product([1, 8, 64], [2, 5, 16]):
        pointers = ("ids", "rows", "chosen", "drawn", "recent", "accepted", "last", "positions", "head_len", "head_end", "out")
        for name in ("gdn_speculate_begin", "gdn_speculate_end"):
            yield name, struct("gdn_speculate_params", seqs=seqs, tokens=tokens, history=64, forced_acceptance=-1.0, **{name: FAR for name in pointers})


def layers():
    """The layer's ops one by one, and what surrounds a ring."""
    for (k, v), dim, seqs, tokens, io in itertools.product(MODELS, [(64, 64), (96, 192), (128, 128), (256, 256)], [1, 64], [1, 8, 4096], CODES):
        channels = 2 * k * dim[0] + v * dim[1]
        slots, seqs_of = dict(num_slots=seqs, slot_stride=3 * channels), dict(num_seqs=seqs, tokens_per_seq=tokens)
        rows = heads(1, channels, tokens)
        yield "gdn_conv", struct("gdn_conv_params", x=rows, y=rows, weight=FAR, state_in=FAR, state_out=FAR, in_slots=slots, out_slots=slots, seqs=seqs_of,
                                 channels=channels, width=4, io_dtype=CODES[io], weight_dtype=CODES[io], silu=1)
        yield "gdn_norm", struct("gdn_norm_params", tokens=seqs * tokens, heads=v, head_v=dim[1], io_dtype=CODES[io], weight_dtype=CODES["f32"], weight=FAR,
                                 eps=1e-6, **{name: heads(v, dim[1], tokens) for name in ("x", "z", "out")})
        for to_ring in (0, 1):
            yield "gdn_ring_inputs", struct("gdn_ring_inputs_params", inputs=FAR, conv_state=FAR, spans=FAR, in_slots=slots, out_slots=slots,
                                            inputs_stride=32 * channels, num_seqs=seqs, channels=channels, conv_width=4, capacity=32, io_dtype=CODES[io],
                                            to_ring=to_ring)
        if tokens <= 16:
            yield "gdn_ring_advance", struct("gdn_ring_advance_params", spans=FAR, accepted=FAR, in_slots=slots, out_slots=slots, seqs=seqs_of, capacity=32,
                                             max_entries=16)


def stored():
    """Matrices between the forms in which they are stored."""
    for (inputs, outputs), io in itertools.product(SIZES, CODES):
        scales = dict(ptr=FAR, stride=(inputs + 127) // 128, rows=128)
        if io != "f32":
            yield "gdn_dequantize", struct("gdn_dequantize_params", w=FAR, scales=scales, y=FAR, w_stride=inputs, y_stride=inputs, outputs=outputs,
                                           inputs=inputs, dtype=CODES[io])
        for kind in range(3) if inputs % 256 == 0 else ():
            fields = dict(type=kind, outputs=outputs, inputs=inputs)
            yield "gdn_quantized_pack", struct("gdn_quantized_pack_params", to=FAR, **{"from": FAR}, **fields)
            yield "gdn_quantized_rows", struct("gdn_quantized_rows_params", w=FAR, ids=FAR, y=FAR, y_stride=inputs, rows=64, dtype=CODES[io], **fields)


CASES = [rules, steps, layers, products, stored, experts, attentions, gradients, rows_of_models]


def launchers():
    """The functions of the headers that take parameters and a stream; gdn_linear_with is gdn_linear with a division for measurements."""
    return {name for name, (arguments, _) in ABI.functions.items()
            if len(arguments) > 1 and arguments[-1] is C.c_void_p and arguments[0].__name__.endswith("Params")} - {"gdn_linear_with"}


def failures(library, card):
    """Launches every case; what was refused, a line each, and how many launches there were."""
    lib = abi.load(library)
    lib.fake_card(*card)
    refused, missing = [], launchers()
    for name, params in itertools.chain.from_iterable(cases() for cases in CASES):
        missing.discard(name)
        query, size = getattr(lib, f"{name}_workspace", None), C.c_int64(0)
        if query:
            asked = [params.rows] if name == "gdn_sampling" else [C.byref(params)]
            status = query(*asked, C.byref(size))
            assert status == ABI.constants["GDN_OK"], (name, status)
            params.workspace, params.workspace_bytes = FAR, size.value
        arguments = [C.byref(params), None, None] if name == "gdn_scaled" else [C.byref(params), None]
        status = getattr(lib, name)(*arguments)
        if status != ABI.constants["GDN_OK"]:
            refused.append(f"{name}: {lib.gdn_status_string(status).decode()}: {words(params)}")
    return refused + [f"{name}: not in these cases" for name in sorted(missing)], lib.fake_launches()


def words(params):
    found = []
    for field, kind in params._fields_:
        value = getattr(params, field)
        if isinstance(value, abi.Struct):
            found.append(words(value))
        elif value not in (None, 0, FAR):
            found.append(f"{field}={value}")
    return " ".join(word for word in found if word)


class Shapes(unittest.TestCase):
    def test_every_launcher_on_every_card(self):
        built, include = libraries(), os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
        if len(built) < 2 or not os.path.isdir(include):
            self.skipTest("needs libcandle_gdn_cuda.a and libcandle_gdn_models_cuda.a below CARGO_TARGET_DIR, and CUDA_HOME")
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "fake.so")
            subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-I", include, os.path.join(HERE, "fake_cudart.c"),
                            "-Wl,--whole-archive", *built, "-Wl,--no-whole-archive", "-lstdc++", "-o", library], check=True)
            for card in CARDS:      # a process each, since the launchers remember what they asked
                done = subprocess.run([sys.executable, __file__, library, *map(str, card)], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, f"{card}: {done.stdout[-4000:]}{done.stderr[-2000:]}")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        refused, launches = failures(sys.argv[1], [int(x) for x in sys.argv[2:]])
        print(*refused, f"{launches} launches, {len(refused)} refused", sep="\n")
        sys.exit(1 if refused or launches < 1000 else 0)
    unittest.main()
