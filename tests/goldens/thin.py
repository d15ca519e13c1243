#!/usr/bin/env python3
"""Makes the small golden files of this folder from the full ones.

    thin.py FULL_GOLDENS_DIR

The full files were computed with transformers 5.17 in float32 (layers) and a float64 token recurrence (ops). To keep
the repository small, the first six ops cases keep every 8th row of the value dimension and the layer files keep every 8th
row of the final recurrent state: rows of V do not depend on each other, so what is left is exact. Of the Qwen3.5 layer
only three of the five runs are kept. Of the gradients (by autograd, in float64) one case each is kept: of the rule one with zero
rows and empty sequences, with every 8th row of the final state and of its gradient; of the layer the first, with every 4th row
of the gradients of the matrices. The adapters in lora, which PEFT 0.21.2 wrote, are three of the full ones as they are, and
demo_training, which torch computed in float32, is the full file. The tests read the full files instead when CANDLE_GDN_GOLDENS
names their folder.
"""
import json
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (bfloat16 for numpy)
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

full, here = Path(sys.argv[1]), Path(__file__).parent


def read(name):
    with safe_open(full / name, "np") as f:
        return {key: f.get_tensor(key) for key in f.keys()}, f.metadata()


tensors, meta = read("ops.safetensors")
cases = json.loads(meta["cases"])
for i in range(6):
    for key in ("v", "out"):
        tensors[f"{i}.{key}"] = np.ascontiguousarray(tensors[f"{i}.{key}"][:, :, ::8])
    for key in ("state", "new_state"):
        tensors[f"{i}.{key}"] = np.ascontiguousarray(tensors[f"{i}.{key}"][:, :, ::8])
    cases[i]["V"] //= 8
save_file(tensors, here / "ops.safetensors", {"cases": json.dumps(cases)})

for name, runs in (("layer_qwen3_next", range(5)), ("layer_qwen3_5", (0, 3, 4))):
    tensors, meta = read(f"{name}.safetensors")
    plan = json.loads(meta["plan"])
    plan = [steps if i in runs else [] for i, steps in enumerate(plan)]
    kept = {k: t for k, t in tensors.items() if k.startswith("w.") or int(k.split(".")[0]) in runs}
    for i in runs:
        key = f"{i}.recurrent_state"
        kept[key] = np.ascontiguousarray(kept[key][..., ::8])  # [batch, HV, K, V]
    save_file(kept, here / f"{name}.safetensors", {"config": meta["config"], "plan": json.dumps(plan)})

tensors, meta = read("op_grads.safetensors")
case = 3
kept = {f"0.{key.split('.', 1)[1]}": t for key, t in tensors.items() if key.startswith(f"{case}.")}
for key in ("new_state", "grad.state"):
    kept[f"0.{key}"] = np.ascontiguousarray(kept[f"0.{key}"][:, :, ::8])
save_file(kept, here / "op_grads.safetensors", {"cases": json.dumps([json.loads(meta["cases"])[case]])})

tensors, meta = read("layer_grads.safetensors")
kept = {key: t for key, t in tensors.items() if key.startswith(("w.", "0."))}
for key in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
    kept[f"0.grad.{key}.weight"] = np.ascontiguousarray(kept[f"0.grad.{key}.weight"][::4])
save_file(kept, here / "layer_grads.safetensors", {"config": meta["config"], "shapes": json.dumps(json.loads(meta["shapes"])[:1])})
