#!/usr/bin/env python3
"""Makes demo_transformers.safetensors: what transformers makes of the demo checkpoint as a user loads it.

    transformers_goldens.py CHECKPOINT_DIR DEMO_GOLDENS OUT

The prompts are those of DEMO_GOLDENS (demo_goldens.safetensors), and the tensors have the same names and meanings. The
difference is how the model came to be: `from_pretrained(dtype=float32)` here, while the other file was computed by a
model that had been cast to bf16 and back as a whole, its rotary frequencies included. The script prints how far both
ways of loading are from that file. Written with transformers 5.17 and torch 2.11, eager kernels, on a CPU.
"""
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

checkpoint, goldens, out = sys.argv[1:]
goldens = load_file(goldens)
prompts = sorted({int(key.split(".")[0]) for key in goldens})
torch.manual_seed(0)


def load():
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def answers(model, i):
    ids = goldens[f"{i}.ids"].long()
    logits = model(ids[None]).logits[0].float()
    logprobs = torch.log_softmax(logits[:-1].double(), -1).gather(1, ids[1:, None])[:, 0].float()
    greedy, margins, fed = [], [], ids
    for _ in range(len(goldens[f"{i}.greedy"])):
        last = model(fed[None]).logits[0, -1].float()
        best = last.topk(2).values
        greedy.append(last.argmax())
        margins.append(best[0] - best[1])
        fed = torch.cat([fed, greedy[-1][None]])
    return {
        f"{i}.ids": ids,
        f"{i}.logits_last": logits[-1].contiguous(),
        f"{i}.logprobs": logprobs.contiguous(),
        f"{i}.greedy": torch.stack(greedy),
        f"{i}.greedy_margin": torch.stack(margins),
    }


def report(name, tensors):
    for i in prompts:
        far = (tensors[f"{i}.logits_last"] - goldens[f"{i}.logits_last"]).abs().max().item()
        same = (tensors[f"{i}.greedy"] == goldens[f"{i}.greedy"]).sum().item()
        print(f"{name}: prompt {i}, {len(tensors[f'{i}.ids'])} tokens: logits {far:.2e}, greedy {same}/48 the same")


model = load()
frequencies = [b for n, b in model.named_buffers() if n.endswith("inv_freq")][0]
print("inv_freq as loaded:", frequencies.dtype, frequencies[:4].tolist())
fresh = {k: t for i in prompts for k, t in answers(model, i).items()}
report("from_pretrained(float32)", fresh)
save_file(fresh, out)

whole = load().bfloat16().float()
report("cast as a whole to bfloat16 and back", {k: t for i in prompts for k, t in answers(whole, i).items()})
