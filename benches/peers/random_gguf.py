#!/usr/bin/env python3
"""Writes a GGUF file of one of our configurations of Qwen3.5 (dense) with random weights in f16, for benches/peers/gguf.py:

    python3 benches/peers/random_gguf.py examples/generate/configs/qwen3.5-0.8b.json F16.gguf
    llama-quantize F16.gguf Q4_K_M.gguf Q4_K_M      # for each other type; llama_cpp.py builds this program of llama.cpp

Names, layout and metadata are those of llama.cpp's converter. Tokens are made up: no text can be made with it. Needs numpy.
"""
import argparse
import json
import os
import struct
import sys

import numpy as np

ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
SCALARS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}
TENSOR_TYPES = {np.dtype("float32"): 0, np.dtype("float16"): 1}


def string(text):
    text = text.encode()
    return struct.pack("<Q", len(text)) + text


def value(kind, x):
    if kind == STRING:
        return string(x)
    return struct.pack(SCALARS[kind], x)


def entry(name, kind, x):
    if isinstance(x, list):
        return string(name) + struct.pack("<IIQ", ARRAY, kind, len(x)) + b"".join(value(kind, y) for y in x)
    return string(name) + struct.pack("<I", kind) + value(kind, x)


def is_attention(c, layer):
    return (layer + 1) % c["full_attention_interval"] == 0


def metadata(c):
    layers, rope = range(c["num_hidden_layers"]), c["rope_parameters"]
    rotary = int(c["head_dim"] * rope["partial_rotary_factor"])
    third = rotary // 6 + (rotary % 6 > 0)
    tokens = [f"<{i}>" for i in range(c["vocab_size"])]
    of_model = [
        ("block_count", U32, len(layers)), ("context_length", U32, c["max_position_embeddings"]), ("embedding_length", U32, c["hidden_size"]),
        ("feed_forward_length", U32, c["intermediate_size"]), ("attention.head_count", U32, c["num_attention_heads"]),
        ("attention.head_count_kv", U32, c["num_key_value_heads"]), ("attention.key_length", U32, c["head_dim"]),
        ("attention.value_length", U32, c["head_dim"]), ("attention.layer_norm_rms_epsilon", F32, c["rms_norm_eps"]),
        ("rope.freq_base", F32, rope["rope_theta"]), ("rope.dimension_count", U32, rotary),
        ("rope.dimension_sections", I32, [third, third, rotary // 2 - 2 * third, 0]), ("full_attention_interval", U32, c["full_attention_interval"]),
        ("attention.recurrent_layers", BOOL, [not is_attention(c, i) for i in layers]), ("ssm.conv_kernel", U32, c["linear_conv_kernel_dim"]),
        ("ssm.state_size", U32, c["linear_key_head_dim"]), ("ssm.group_count", U32, c["linear_num_key_heads"]),
        ("ssm.time_step_rank", U32, c["linear_num_value_heads"]), ("ssm.inner_size", U32, c["linear_num_value_heads"] * c["linear_value_head_dim"])]
    return [("general.architecture", STRING, "qwen35"), ("general.type", STRING, "model"), ("general.name", STRING, "random"),
            ("general.file_type", U32, 1), ("general.quantization_version", U32, 2), *(("qwen35." + name, kind, x) for name, kind, x in of_model),
            ("tokenizer.ggml.model", STRING, "gpt2"), ("tokenizer.ggml.pre", STRING, "gpt-2"), ("tokenizer.ggml.tokens", STRING, tokens),
            ("tokenizer.ggml.token_type", I32, [1] * len(tokens)), ("tokenizer.ggml.merges", STRING, ["< 0"]),
            ("tokenizer.ggml.eos_token_id", U32, c["eos_token_id"])]


def tensors(c):
    """(name, rows and columns, what it is filled with)."""
    hidden, wide, heads, dim = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["head_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
    hv = c["linear_num_value_heads"]
    yield "token_embd", (c["vocab_size"], hidden), "weights"
    for i in range(c["num_hidden_layers"]):
        shared = [("attn_norm", (hidden,), "ones"), ("post_attention_norm", (hidden,), "ones"), ("ffn_gate", (wide, hidden), "weights"),
                  ("ffn_up", (wide, hidden), "weights"), ("ffn_down", (hidden, wide), "weights")]
        attention = [("attn_q", (2 * heads * dim, hidden), "weights"), ("attn_k", (c["num_key_value_heads"] * dim, hidden), "weights"),
                     ("attn_v", (c["num_key_value_heads"] * dim, hidden), "weights"), ("attn_q_norm", (dim,), "ones"), ("attn_k_norm", (dim,), "ones"),
                     ("attn_output", (hidden, heads * dim), "weights")]
        linear = [("attn_qkv", (2 * keys + values, hidden), "weights"), ("attn_gate", (values, hidden), "weights"), ("ssm_alpha", (hv, hidden), "weights"),
                  ("ssm_beta", (hv, hidden), "weights"), ("ssm_conv1d", (2 * keys + values, c["linear_conv_kernel_dim"]), "taps"),
                  ("ssm_norm", (c["linear_value_head_dim"],), "ones"), ("ssm_a", (hv,), "decays"), ("ssm_dt", (hv,), "steps"),
                  ("ssm_out", (hidden, values), "weights")]
        for name, shape, kind in shared + (attention if is_attention(c, i) else linear):
            yield f"blk.{i}.{name}", shape, kind
    yield "output_norm", (hidden,), "ones"
    if not c["tie_word_embeddings"]:
        yield "output", (c["vocab_size"], hidden), "weights"


# Weights like those of a model before training; decays as in data.py, as the converter stores them: -e^A_log and dt_bias.
FILLED = {
    "weights": lambda random, shape: (0.02 * random.standard_normal(shape, dtype=np.float32)).astype(np.float16),
    "taps": lambda random, shape: 0.3 * random.standard_normal(shape, dtype=np.float32),
    "ones": lambda random, shape: np.ones(shape, np.float32),
    "decays": lambda random, shape: -random.uniform(1, 16, shape).astype(np.float32),
    "steps": lambda random, shape: random.standard_normal(shape, dtype=np.float32) - 4,
}


def suffix(name):
    return {"ssm_a": "", "ssm_dt": ".bias"}.get(name.rpartition(".")[2], ".weight")


def write(c, path):
    about, random = metadata(c), np.random.default_rng(0)
    found, offset, infos = list(tensors(c)), 0, []
    for name, shape, kind in found:
        dtype = np.dtype("float16" if kind == "weights" else "float32")
        infos.append(string(name + suffix(name)) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), TENSOR_TYPES[dtype], offset))
        offset += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    with open(path, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(found), len(about)))
        f.write(b"".join(entry(*x) for x in about) + b"".join(infos))
        for _, shape, kind in found:
            f.write(bytes(-f.tell() % ALIGNMENT))
            f.write(FILLED[kind](random, shape).tobytes())


def main(argv=None):
    parser = argparse.ArgumentParser(prog="random_gguf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="a config.json of a dense Qwen3.5")
    parser.add_argument("file", metavar="FILE")
    args = parser.parse_args(argv)
    try:
        with open(args.config, encoding="utf-8") as f:
            config = json.load(f)
    except (OSError, ValueError) as e:
        parser.error(f"{args.config}: {e}")
    if not isinstance(config, dict) or config.get("model_type") != "qwen3_5_text":
        parser.error(f"{args.config}: expected the configuration of a dense Qwen3.5, with the model_type qwen3_5_text")
    try:
        write(config, args.file)
    except KeyError as e:
        parser.error(f"{args.config}: no {e}")
    except (OSError, TypeError, ValueError, ZeroDivisionError, struct.error) as e:
        parser.error(f"{args.config} to {args.file}: {e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
