//! Nonsense in, a sentence out: every refusal names the op, the argument, what was expected and what came.

use crate::semantics::Args;
use crate::step_args::{Argument, StepArgs, ARGUMENTS};
use crate::support::{devices, gdn_decode, gdn_prefill, refused};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{Gates, GdnDecode, GdnPrefill, RuleOptions};
use candle_gdn::{Algo, CuSeqlens};

pub fn zeros(shape: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(shape, DType::F32, device).unwrap()
}

fn to(tensor: &mut Tensor, dtype: DType) {
    *tensor = tensor.to_dtype(dtype).unwrap();
}

/// What the rule takes, to be changed one at a time: HK 2, HV 4, K 16, V 32.
#[derive(Clone)]
pub struct Rule {
    args: Args,
    options: RuleOptions,
}

impl Rule {
    /// `lead` are batch and tokens, packed tokens, or the batch of decode.
    pub fn new(lead: &[usize], slots: usize, device: &Device) -> Self {
        let z = |tail: &[usize]| zeros(&[lead, tail].concat(), device);
        let heads = zeros(&[4], device);
        let gates = Gates { a: z(&[4]), b: z(&[4]), a_log: heads.clone(), dt_bias: heads };
        let state = zeros(&[slots, 4, 32, 16], device);
        let args = Args { q: z(&[2, 16]), k: z(&[2, 16]), v: z(&[4, 32]), gates, state };
        Self { args, options: RuleOptions::default() }
    }

    pub fn with(&self, change: impl FnOnce(&mut Args)) -> Self {
        let mut rule = self.clone();
        change(&mut rule.args);
        rule
    }

    fn with_options(&self, change: impl FnOnce(&mut RuleOptions)) -> Self {
        let mut rule = self.clone();
        change(&mut rule.options);
        rule
    }

    pub fn args(&self) -> &Args {
        &self.args
    }

    fn decode(&self) -> Result<()> {
        let Args { q, k, v, gates, state } = &self.args;
        gdn_decode(q, k, v, gates, state, self.options).map(drop)
    }

    /// Decode refuses the change with a sentence that begins with its name and the first of `parts`.
    #[track_caller]
    fn refuses(&self, change: impl FnOnce(&mut Args), parts: &[&str]) {
        let first = format!("gdn_decode: {}", parts[0]);
        refused(self.with(change).decode(), &[&[&first[..]], &parts[1..]].concat());
    }

    fn op(&self) -> Result<GdnPrefill> {
        GdnPrefill::new(self.args.gates.clone(), &self.args.state, None, self.options)
    }
}

#[test]
fn rule_shapes() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let good = Rule::new(&[3], 3, device);
        good.decode().unwrap();
        let keys = |x: &mut Args, shape: &[usize]| (x.q, x.k) = (z(shape), z(shape));
        good.refuses(|x| x.q = z(&[3, 2, 2, 16]), &["q:", "[3, 2, 2, 16]"]);
        good.refuses(|x| x.q = z(&[3, 2, 17]), &["q:", "key_heads, 16", "[3, 2, 17]"]);
        good.refuses(|x| keys(x, &[3, 3, 16]), &["q:", "divides the 4 value heads", "got 3"]);
        good.refuses(|x| keys(x, &[3, 0, 16]), &["q:", "divides", "got 0"]);
        good.refuses(|x| x.k = z(&[2, 2, 16]), &["k:", "[3, 2, 16]", "[2, 2, 16]"]);
        good.refuses(|x| x.k = z(&[3, 4, 16]), &["k:", "[3, 2, 16]", "[3, 4, 16]"]);
        good.refuses(|x| x.v = z(&[3, 4, 16]), &["v:", "[3, 4, 32]", "[3, 4, 16]"]);
        good.refuses(|x| x.gates.a = z(&[3, 2]), &["a:", "[3, 4]", "[3, 2]"]);
        good.refuses(|x| x.gates.a_log = z(&[2]), &["a_log:", "[4]", "[2]"]);
        good.refuses(|x| x.state = z(&[2, 4, 32, 16]), &["state:", "expected 3 slots", "got 2"]);
        let swapped = "state: expected shape [3, 4, 32, 16], value_dim before key_dim as v and q have them";
        good.refuses(|x| x.state = z(&[3, 4, 16, 32]), &[swapped, "got [3, 4, 16, 32]"]);
        let merged = |x: &mut Args| (x.q, x.k, x.v) = (z(&[3, 32]), z(&[3, 32]), z(&[3, 128]));
        good.with(merged).refuses(|x| x.state = z(&[3, 4, 16, 32]), &[swapped]);
        good.refuses(|x| x.state = z(&[3, 4, 32, 17]), &["q:", "key_heads, 17"]);
        good.refuses(|x| x.state = z(&[3, 4, 32]), &["state:", "[3, 4, 32]"]);
        let wide = good.with(|x| x.state = z(&[3, 4, 32, 300]));
        wide.refuses(|x| keys(x, &[3, 2, 300]), &["state:", "1 to 256"]);
        let new = |state: &Tensor| GdnDecode::new(good.args.gates.clone(), state, good.options);
        refused(new(&z(&[3, 4, 16, 32]).transpose(2, 3).unwrap()), &["state:", "contiguous", "strides"]);
        refused(new(&z(&[1, 4, 32, 16]).broadcast_as((3, 4, 32, 16)).unwrap()), &["state:", "overlap"]);

        let options = |change: fn(&mut RuleOptions), parts: &[&str]| {
            refused(good.with_options(change).decode(), parts);
        };
        options(|o| o.l2_eps = -1.0, &["l2_eps", "got -1"]);
        options(|o| o.scale = Some(f64::NAN), &["scale: expected a value that is finite in f32, got NaN"]);
        options(|o| o.scale = Some(1e39), &["scale: expected a value that is finite in f32, got 1"]);
        options(|o| o.beta_scale = 3.0, &["beta_scale", "got 3"]);
        options(|o| o.algo = Algo::Recurrent128, &["algo", "Recurrent128", "16"]);
        options(|o| o.algo = Algo::Decode, &["gdn_decode: algo: Decode supports K of 64", "got 16 (K)"]);

        let prefill = |n: usize| {
            let (k, ab, heads) = (z(&[1, n, 1, 128]), z(&[1, n, 1]), z(&[1]));
            let gates = Gates { a: ab.clone(), b: ab, a_log: heads.clone(), dt_bias: heads };
            let options = RuleOptions::with(|o| o.algo = Algo::Decode);
            gdn_prefill(&k, &k, &k, &gates, &z(&[1, 1, 128, 128]), None, options)
        };
        refused(prefill(17), &["gdn_prefill: algo: Decode supports up to 16 tokens a sequence, got 17"]);
        if device.is_cpu() {
            prefill(16).unwrap(); // on CUDA the kernel's own tests say so
        }
    }
}

#[test]
fn rule_dtypes() {
    for device in &devices() {
        let good = Rule::new(&[1], 1, device);
        good.refuses(|x| to(&mut x.q, DType::F64), &["q:", "f32, bf16 or f16", "F64"]);
        good.refuses(|x| to(&mut x.k, DType::BF16), &["k:", "expected dtype F32, got BF16"]);
        good.refuses(|x| to(&mut x.v, DType::F16), &["v:", "expected dtype F32, got F16"]);
        good.refuses(|x| to(&mut x.gates.a, DType::U32), &["a:", "U32"]);
        good.refuses(|x| to(&mut x.gates.b, DType::BF16), &["b:", "expected dtype F32, got BF16"]);
        good.refuses(|x| to(&mut x.gates.dt_bias, DType::BF16), &["dt_bias:", "expected dtype F32, got BF16"]);
        for dtype in [DType::F16, DType::F64, DType::U32] {
            let message = format!("state: expected dtype f32 or bf16, got {dtype:?}");
            good.refuses(|x| to(&mut x.state, dtype), &[&message]);
            refused(good.with(|x| to(&mut x.state, dtype)).op(), &["gdn_prefill: ", &message]);
        }
        // The bare CustomOp checks too.
        let Args { k, v, gates, state, .. } = &good.args;
        let op = GdnDecode::new(gates.clone(), state, good.options).unwrap();
        let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap();
        refused(wide(k).apply_op3_no_bwd(&wide(k), &wide(v), &op), &["F64"]);
        refused(k.apply_op3_no_bwd(&k.to_dtype(DType::BF16).unwrap(), v, &op), &["k:", "BF16"]);
    }
}

#[test]
fn rule_sequences_and_slots() {
    for device in &devices() {
        let Args { k, v, gates, state, .. } = &Rule::new(&[7], 2, device).args;
        let o = RuleOptions::default();
        let run = |cu: &CuSeqlens| gdn_prefill(k, k, v, gates, state, Some(cu), o);
        let cu = |cu: &[u32]| CuSeqlens::new(cu, device);
        run(&cu(&[0, 3, 7]).unwrap()).unwrap();
        refused(cu(&[0, 4, 3]), &["cu_seqlens", "non-decreasing", "3 after 4"]);
        refused(cu(&[1, 7]), &["cu_seqlens: expected the first value to be 0, got 1"]);
        refused(cu(&[]), &["cu_seqlens: expected the first value to be 0, got no values"]);
        refused(run(&cu(&[0, 3, 6]).unwrap()), &["cu_seqlens", "expected 7 tokens", "got 6"]);
        refused(run(&cu(&[0, 3, 5, 7]).unwrap()), &["state", "expected 3 slots", "got 2"]);
        // Without cu_seqlens q is a batch of 7 with 2 tokens of one merged head, which v is not.
        let batch = gdn_prefill(k, k, v, gates, state, None, o);
        let sentence =
            "gdn_prefill: cu_seqlens: expected the boundaries of packed tokens (q is [7, 2, 16], without a batch)";
        refused(batch, &[sentence, "got none"]);
        let one = |tail: usize| zeros(&[7, 1, tail], device);
        let (k1, v1, gate) = (one(16), one(32), zeros(&[7, 1], device));
        let (heads, state1) = (zeros(&[1], device), zeros(&[2, 1, 32, 16], device));
        let gates1 = Gates { a: gate.clone(), b: gate, a_log: heads.clone(), dt_bias: heads };
        let batch = gdn_prefill(&k1, &k1, &v1, &gates1, &state1, None, o);
        refused(batch, &["state: expected 7 slots (one for each sequence), got 2; packed tokens need cu_seqlens"]);

        let good = cu(&[0, 3, 7]).unwrap();
        let with =
            |slots: &Tensor| GdnPrefill::new(gates.clone(), state, Some(&good), o)?.with_slots(slots).forward(k, k, v);
        refused(with(&Tensor::new(&[0u32, 1, 1], device).unwrap()), &["slots", "[2]", "[3]"]);
        refused(with(&Tensor::new(&[0f32, 1.], device).unwrap()), &["slots", "U32", "F32"]);
        let strided = Tensor::new(&[0u32, 7, 1, 7], device).unwrap().reshape((2, 2)).unwrap().narrow(1, 0, 1).unwrap();
        refused(with(&strided.squeeze(1).unwrap()), &["slots: expected a contiguous tensor, got strides [2]"]);
        if device.is_cpu() {
            refused(with(&Tensor::new(&[0u32, 2], device).unwrap()), &["slots", "below 2", "got 2 at 1"]);
            refused(with(&Tensor::new(&[1u32, 1], device).unwrap()), &["slots", "distinct", "1 a second time"]);
        }
    }
}

/// Arguments on another device than the state, where there are two.
#[test]
fn devices_must_agree() {
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let (good, cpu) = (Rule::new(&[1], 1, &gpu), Rule::new(&[1], 1, &Device::Cpu).args);
    good.decode().unwrap();
    good.refuses(|x| x.gates = cpu.gates.clone(), &["a:", "Cpu"]);
    good.refuses(|x| x.q = cpu.q.clone(), &["q:", "Cpu"]);
    good.refuses(|x| x.state = cpu.state.clone(), &["a:", "Cuda"]);
}

/// K 16, V 32, batch 3.
fn small_step(device: &Device) -> StepArgs {
    StepArgs::new(&[3], 3, [16, 32], |shape| zeros(shape, device))
}

/// K = V = 128, for the kernels that want it; `tokens` a sequence.
fn step_of_128(tokens: usize, algo: Algo, device: &Device) -> StepArgs {
    StepArgs::new(&[3, tokens], 3, [128, 128], |shape| zeros(shape, device)).with(|s| s.options.rule.algo = algo)
}

/// Refuses the change with a sentence that begins with the op's name and the first of `parts`.
#[track_caller]
fn refuses(good: &StepArgs, change: impl FnOnce(&mut StepArgs), parts: &[&str]) {
    let first = format!("gdn_step: {}", parts[0]);
    refused(good.with(change).run(), &[&[&first[..]], &parts[1..]].concat());
}

#[test]
fn step_shapes() {
    for device in &devices() {
        let z = |shape: &[usize]| zeros(shape, device);
        let good = small_step(device);
        assert_eq!(good.run().unwrap().dims(), [3, 128]);

        let shapes = "qkv: expected shape [batch, 192] or [batch, tokens, 192], got";
        refuses(&good, |s| s.qkv = z(&[3, 191]), &[shapes, "[3, 191]"]);
        refuses(&good, |s| s.qkv = z(&[192]), &[shapes, "[192]"]);
        refuses(&good, |s| s.qkv = z(&[3, 1, 1, 192]), &[shapes, "[3, 1, 1, 192]"]);
        let tokens = |s: &mut StepArgs, n: usize| {
            (s.qkv, s.z) = (z(&[3, n, 192]), z(&[3, n, 128]));
            (s.gates.a, s.gates.b) = (z(&[3, n, 4]), z(&[3, n, 4]));
        };
        assert_eq!(good.with(|s| tokens(s, 16)).run().unwrap().dims(), [3, 16, 128]);
        let most = "qkv: expected at most 16 tokens a sequence, got 17; gdn_prefill_in_place supports any number";
        refuses(&good, |s| tokens(s, 17), &[most]);
        refuses(&good, |s| s.z = z(&[3, 127]), &["z: expected shape [3, 4, 32] or [3, 128], got [3, 127]"]);
        refuses(&good, |s| s.z = z(&[3, 1, 128]), &["z:", "[3, 1, 128]"]);
        refuses(&good, |s| s.z = z(&[2, 128]), &["z:", "[2, 128]"]);
        let weight = "conv_weight: expected shape [192, 4], got [192, 3]";
        refuses(&good, |s| s.conv_weight = z(&[192, 3]), &[weight]);
        let norm = "norm_weight: expected shape [32], got [16]; the state is [slots, value_heads, value_dim, key_dim]";
        refuses(&good, |s| s.norm_weight = z(&[16]), &[norm]);
        refuses(&good, |s| s.gates.a = z(&[3, 1, 4]), &["a: expected shape [3, 4], got [3, 1, 4]"]);
        refuses(&good, |s| s.gates.b = z(&[3, 2]), &["b: expected shape [3, 4], got [3, 2]"]);
        refuses(&good, |s| s.gates.a_log = z(&[2]), &["a_log: expected shape [4], got [2]"]);

        let conv =
            |conv: Tensor, parts: &[&str]| refuses(&good, |s| s.conv = conv, &[&["conv_state:"], parts].concat());
        conv(z(&[3, 192]), &["expected shape [slots, width - 1, channels], got [3, 192]"]);
        conv(z(&[3, 8, 192]), &["width of 2 to 8", "[3, 8, 192]"]);
        conv(z(&[3, 3, 0]), &["width of 2 to 8", "[3, 3, 0]"]);
        conv(z(&[4, 3, 192]), &["expected 3 slots (the state's), got 4"]);
        let channels = "expected 2 * key_heads * 16 + 128 channels (q, k and v of the state's heads)";
        conv(z(&[3, 3, 200]), &[channels, "got 200"]);
        conv(z(&[3, 3, 128]), &[channels, "got 128"]);
        conv(z(&[3, 3, 64]), &[channels, "got 64"]);
        conv(z(&[3, 3, 224]), &["divides the 4 value heads, got 224, which is 3 key heads"]);
        conv(z(&[3, 192, 3]).transpose(1, 2).unwrap(), &["slot to be contiguous", "strides"]);
        conv(z(&[1, 3, 192]).broadcast_as((3, 3, 192)).unwrap(), &["overlap"]);
        let two = "state: expected 3 slots (one for each sequence), got 2";
        refuses(&good, |s| (s.conv, s.state) = (z(&[2, 3, 192]), z(&[2, 4, 32, 16])), &[two]);
        refuses(&good, |s| s.state = z(&[3, 4, 32]), &["state: expected shape", "[3, 4, 32]"]);
        let wide = good.with(|s| (s.conv, s.qkv, s.state) = (z(&[3, 3, 728]), z(&[3, 728]), z(&[3, 4, 32, 300])));
        refuses(&wide, |_| (), &["conv_weight:"]);
        refuses(&wide, |s| s.conv_weight = z(&[728, 4]), &["state:", "1 to 256", "[3, 4, 32, 300]"]);
    }
}

#[test]
fn step_options_and_dtypes() {
    for device in &devices() {
        let good = small_step(device);
        refuses(&good, |s| s.options.rule.l2_eps = -1.0, &["l2_eps", "got -1"]);
        refuses(&good, |s| s.options.rule.scale = Some(f64::INFINITY), &["scale", "inf"]);
        refuses(&good, |s| s.options.rule.beta_scale = 0.0, &["beta_scale", "got 0"]);
        refuses(&good, |s| s.options.norm_eps = -1.0, &["norm_eps: expected a finite value of at least 0, got -1"]);
        refuses(&good, |s| s.options.norm_eps = f64::NAN, &["norm_eps", "NaN"]);

        refuses(&good, |s| to(&mut s.qkv, DType::F16), &["qkv: expected dtype F32, got F16"]);
        refuses(&good, |s| to(&mut s.z, DType::BF16), &["z: expected dtype F32, got BF16"]);
        refuses(&good, |s| to(&mut s.conv_weight, DType::BF16), &["conv_weight: expected dtype F32, got BF16"]);
        refuses(&good, |s| to(&mut s.norm_weight, DType::F16), &["norm_weight:", "got F16"]);
        refuses(&good, |s| to(&mut s.conv, DType::F64), &["conv_state: expected dtype f32, bf16 or f16"]);
        refuses(&good, |s| to(&mut s.state, DType::F16), &["state: expected dtype f32 or bf16, got F16"]);
        refuses(&good, |s| to(&mut s.gates.a, DType::U32), &["a: expected dtype f32, bf16 or f16, got U32"]);
        refuses(&good, |s| to(&mut s.gates.b, DType::F16), &["b: expected dtype F32, got F16"]);
        // The bare CustomOp checks too.
        let (op, half) = (good.op().unwrap(), good.z.to_dtype(DType::F16).unwrap());
        refused(good.qkv.apply_op3_no_bwd(&half, &good.conv_weight, &op), &["gdn_step: z:", "F16"]);
        refused(good.qkv.apply_op3_no_bwd(&good.z, &good.qkv, &op), &["gdn_step: conv_weight:", "[3, 192]"]);

        for algo in [Algo::StepWhole, Algo::StepSplit, Algo::StepHeads] {
            let sentence =
                format!("algo: {algo:?} supports heads of 128, or 96 (K) and 192 (V), and a convolution of width 4");
            refuses(&good, |s| s.options.rule.algo = algo, &[&sentence, "got 16 (K), 32 (V) and 4"]);
            let narrow = (zeros(&[3, 2, 1024], device), zeros(&[1024, 3], device));
            let wide = step_of_128(1, algo, device);
            refuses(&wide, |s| (s.conv, s.conv_weight) = narrow, &[&sentence, "got 128 (K), 128 (V) and 3"]);
        }
        let several = step_of_128(2, Algo::StepSplit, device);
        refuses(&several, |_| (), &["algo: StepSplit supports one token a sequence, got 2"]);
        // What only a device refuses: rows that begin anywhere.
        let good = step_of_128(1, Algo::StepWhole, device);
        let off = zeros(&[3, 1, 1025], device).narrow(2, 1, 1024).unwrap();
        let off = good.with(|s| s.qkv = off);
        if device.is_cuda() {
            let sentence =
                "gdn_step: algo: StepWhole does not support these tensors on this device: expected rows of qkv, z";
            refused(off.run(), &[sentence, "Auto supports any"]);
            refused(off.op().unwrap().algo(&off.qkv, &off.z, &off.conv_weight), &[sentence]);
        } else {
            off.run().unwrap();
        }
        let auto = off.with(|s| s.options.rule.algo = Algo::Auto);
        assert_eq!(auto.op().unwrap().algo(&auto.qkv, &auto.z, &auto.conv_weight).unwrap(), Algo::Unfused);
        good.run().unwrap();
    }
}

#[test]
fn step_slots() {
    for device in &devices() {
        let good = small_step(device);
        let slots = |slots: &Tensor| good.forward(|op| op.with_slots(slots));
        slots(&Tensor::new(&[2u32, 0, u32::MAX], device).unwrap()).unwrap();
        refused(slots(&Tensor::new(&[0u32, 1], device).unwrap()), &["gdn_step: slots:", "[3]", "[2]"]);
        refused(slots(&zeros(&[3], device)), &["gdn_step: slots:", "U32", "F32"]);
        if device.is_cpu() {
            refused(slots(&Tensor::new(&[0u32, 1, 3], device).unwrap()), &["gdn_step: slots:", "got 3 at 2"]);
            refused(slots(&Tensor::new(&[1u32, 0, 1], device).unwrap()), &["gdn_step: slots:", "distinct"]);
        }
    }
}

/// Two tensors are written, and no argument may lie in one of them, nor they in each other.
#[test]
fn step_storages() {
    for device in &devices() {
        let good = small_step(device);
        // Each argument in turn is a view of one storage, and so is what is written.
        let pool = zeros(&[3 * 4 * 32 * 16], device);
        let inside = |t: &Tensor| pool.narrow(0, 0, t.elem_count()).unwrap().reshape(t.dims()).unwrap();
        let moved = |step: &StepArgs, argument: Argument| {
            step.with(|s| {
                let tensor = argument(s);
                *tensor = inside(tensor);
            })
        };
        let state_inside = moved(&good, |s| &mut s.state);
        let conv_inside = moved(&good, |s| &mut s.conv);
        state_inside.run().unwrap();
        conv_inside.run().unwrap();
        let shares =
            |arg: &str, with: &str| format!("gdn_step: {arg}: shares its storage with {with}, which is written");
        for (name, argument) in ARGUMENTS {
            refused(moved(&state_inside, argument).run(), &[&shares(name, "the state")]);
            refused(moved(&conv_inside, argument).run(), &[&shares(name, "conv_state")]);
        }
        refused(moved(&state_inside, |s| &mut s.conv).run(), &[&shares("conv_state", "the state")]);

        // The same through the bare CustomOp, which sees storages only.
        let op = state_inside.op().unwrap();
        let z = inside(&good.z);
        refused(good.qkv.apply_op3_no_bwd(&z, &good.conv_weight, &op), &[&shares("z", "the state")]);
        let op = conv_inside.op().unwrap();
        refused(good.qkv.apply_op3_no_bwd(&z, &good.conv_weight, &op), &[&shares("z", "conv_state")]);
    }
}

#[test]
fn step_devices_must_agree() {
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let (good, cpu) = (small_step(&gpu), small_step(&Device::Cpu));
    good.run().unwrap();
    refuses(&good, |s| s.qkv = cpu.qkv.clone(), &["qkv:", "Cpu"]);
    refuses(&good, |s| s.z = cpu.z.clone(), &["z:", "Cpu"]);
    refuses(&good, |s| s.conv_weight = cpu.conv_weight.clone(), &["conv_weight:", "Cpu"]);
    refuses(&good, |s| s.norm_weight = cpu.norm_weight.clone(), &["norm_weight:", "Cpu"]);
    refuses(&good, |s| s.conv = cpu.conv.clone(), &["conv_state:", "Cpu"]);
    refuses(&good, |s| s.gates = cpu.gates.clone(), &["a:", "Cpu"]);
}
