#!/usr/bin/env python3
"""Compares an adapter that `finetune` wrote as PEFT loads it with `perplexity --lora`: the log-probability of each token of a text.

    pip install torch transformers peft
    python3 check_peft.py --model DIR --lora DIR --text FILE [--perplexity PROGRAM]

Both run in float32 on the CPU. The text is cut to 512 tokens.
"""
import argparse
import json
import subprocess
import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

BOUND = 5e-4

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", required=True)
parser.add_argument("--lora", required=True)
parser.add_argument("--text", required=True)
parser.add_argument("--perplexity", default="target/release/examples/perplexity")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
with open(args.text) as file:
    ids = tokenizer(file.read())["input_ids"][:512]


@torch.no_grad()
def log_probabilities(model):
    """Of ids[1:]."""
    logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits[range(len(ids) - 1), ids[1:]]


model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
base = log_probabilities(model)
peft = log_probabilities(PeftModel.from_pretrained(model, args.lora).eval())

command = [args.perplexity, "--cpu", "--dtype", "f32", "--model", args.model, "--lora", args.lora]
lines = subprocess.run(command + ["--token-ids", ",".join(map(str, ids))], check=True, capture_output=True, text=True).stdout.splitlines()
ours = torch.tensor([json.loads(line)["logprob"] for line in lines[:-1]])

difference = (ours - peft).abs().max().item()
print(f"{len(ours)} tokens, mean log-probability: base {base.mean():.4f}, PEFT {peft.mean():.6f}, perplexity {ours.mean():.6f}")
print(f"largest difference {difference:.1e}, bound {BOUND:.0e}; the adapter changes {(peft - base).abs().max():.2f}")
sys.exit(difference > BOUND)
