//! Faults on purpose: a call that fails or panics in the middle of a pass or of a capture, numbers that are not finite,
//! other threads. What is not part of it goes on as if nothing had been. Files, ranks and device memory have files of
//! their own.

use crate::golden::DEMO;
use crate::sequences::{assert_near, want};
use crate::serving::{Completion, Completions};
use crate::support::{devices, gpus, single_stream_devices, values, Rng};
use crate::tiny::Tiny;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_gdn_core::Working;
use candle_gdn_models::{
    rotary_frequencies, shard_of, AttentionCache, AttentionDecode, AttentionPrepare, CausalLm, Collective, DecodeGraph,
    Engine, EngineOptions, FinishReason, GraphChoice, PrepareOptions, Request, Sequence, SequencePool,
};
use candle_nn::VarBuilder;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::sync::Arc;

/// A rank, or a group of one, in which a call may fail.
#[derive(Debug)]
pub struct Faulty {
    rank: Option<Arc<dyn Collective>>,
    /// Calls before the one that fails; negative: none does.
    left: AtomicIsize,
    panics: AtomicBool,
    /// All calls after it fail too.
    for_ever: AtomicBool,
    /// Calls with more rows fail.
    pub rows: AtomicUsize,
}

impl Faulty {
    pub fn new(rank: Option<Arc<dyn Collective>>) -> Arc<Self> {
        let (left, panics, for_ever) = (AtomicIsize::new(-1), AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { rank, left, panics, for_ever, rows: AtomicUsize::new(usize::MAX) })
    }

    /// The call after `calls` more fails.
    pub fn after(&self, calls: isize, panics: bool) {
        self.panics.store(panics, Ordering::SeqCst);
        self.left.store(calls, Ordering::SeqCst);
    }

    /// No call fails from here on. Returns whether the one of [`after`](Self::after) has failed.
    pub fn disarm(&self) -> bool {
        self.left.swap(-1, Ordering::SeqCst) < 0
    }

    fn call(&self) -> Result<()> {
        let left = self.left.fetch_sub(1, Ordering::SeqCst);
        if left == 0 || (left < 0 && self.for_ever.load(Ordering::SeqCst)) {
            assert!(!self.panics.load(Ordering::SeqCst), "a fault on purpose");
            candle_core::bail!("a fault on purpose")
        }
        Ok(())
    }
}

impl Collective for Faulty {
    fn rank(&self) -> usize {
        self.rank.as_ref().map_or(0, |rank| rank.rank())
    }

    fn size(&self) -> usize {
        self.rank.as_ref().map_or(1, |rank| rank.size())
    }

    fn all_reduce(&self, x: &Tensor) -> Result<Tensor> {
        self.call()?;
        if x.dims()[0] > self.rows.load(Ordering::SeqCst) {
            candle_core::bail!("out of memory on purpose")
        }
        self.rank.as_ref().map_or_else(|| Ok(x.clone()), |rank| rank.all_reduce(x))
    }

    fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.call()?;
        self.rank.as_ref().map_or_else(|| x.unsqueeze(0), |rank| rank.all_gather(x))
    }

    fn settle(&self) -> Result<()> {
        self.call()?;
        self.rank.as_ref().map_or(Ok(()), |rank| rank.settle())
    }

    fn is_lost(&self) -> bool {
        self.rank.as_ref().is_some_and(|rank| rank.is_lost())
    }

    fn leave(&self) {
        self.rank.iter().for_each(|rank| rank.leave());
    }
}

/// A model whose passes call `group`.
pub fn model(device: &Device, group: &Arc<Faulty>) -> Result<CausalLm> {
    let group: Arc<dyn Collective> = group.clone();
    let (config, weights) = match device.is_cpu() {
        true => {
            let tiny = Tiny::qwen3_next();
            (tiny.model_config()?, VarBuilder::from_tensors(tiny.weights, DType::F32, device))
        }
        false => (DEMO.config()?, DEMO.weights(DType::F32, device)?),
    };
    let weights = shard_of(weights, &config, &*group)?;
    CausalLm::loader(&config).group(group).load(weights)
}

fn feed(model: &CausalLm, pool: &mut SequencePool, s: Sequence, tokens: &[u32]) -> Result<Vec<f32>> {
    model.feed(pool, &[(s, tokens)])?.squeeze(0)?.to_vec1()
}

/// Every call of a pass in turn: the pass says so, its sequences say so until they are restored, the other goes on.
#[test]
fn a_pass_that_fails_breaks_its_own_sequences() -> Result<()> {
    for device in devices() {
        let group = Faulty::new(None);
        let model = model(&device, &group)?;
        let mut pool = model.new_sequences(3, 64)?;
        let (a, b) = (pool.begin()?, pool.begin()?);
        let (mut seen, prompt) = (vec![1, 2], [5, 6, 7]);
        model.feed_only(&mut pool, &[(a, &prompt), (b, &seen)])?;
        let snapshot = pool.snapshot(a)?;
        let after = want(&model, &[&prompt[..], &[9]].concat())?;
        for panics in [false, true] {
            let mut calls = 0;
            loop {
                group.after(calls, panics);
                let failed = catch_unwind(AssertUnwindSafe(|| feed(&model, &mut pool, a, &[9])));
                let what = format!("call {calls}, panics: {panics}, on {:?}", device.location());
                match failed {
                    Ok(Ok(logits)) => {
                        assert_near(&logits, &after, &what);
                        break;
                    }
                    Ok(Err(e)) => assert!(e.to_string().contains("a fault on purpose"), "{what}: {e}"),
                    Err(_) => assert!(panics, "{what}"),
                }
                group.after(-1, false);
                let again = feed(&model, &mut pool, a, &[9]).expect_err(&what).to_string();
                assert!(again.contains("failed half-way"), "{what}: {again}");
                let token = calls as u32 % 30;
                let logits = feed(&model, &mut pool, b, &[token])?;
                seen.push(token);
                assert_near(&logits, &want(&model, &seen)?, &what);
                pool.restore(a, &snapshot)?;
                assert_near(&feed(&model, &mut pool, a, &[9])?, &after, &what);
                pool.restore(a, &snapshot)?;
                calls += 1;
            }
            assert!(calls > 4, "a pass calls its group in every layer");
            group.after(-1, false);
            pool.restore(a, &snapshot)?;
        }
    }
    Ok(())
}

/// What each of four requests is completed with, in their order, or why it is not.
pub type Completed = Vec<std::result::Result<Vec<u32>, String>>;

/// By an engine for which `arm` prepares a fault once it has its requests.
pub fn completed(model: &CausalLm, cuda_graph: GraphChoice, arm: impl FnOnce()) -> Result<Completed> {
    let options = EngineOptions { cuda_graph, ..EngineOptions::new(3, 64) };
    let mut engine = Engine::new(model, options)?;
    let mut ids = vec![];
    for n in 0..4u32 {
        let mut request = Request::new((0..3 + 2 * n).map(|i| (5 * i + n) % 30).collect(), 4 + n as usize);
        request.sampling.temperature = f64::from(n % 2);
        ids.push(engine.submit(request)?);
    }
    let mut all = Completions::default();
    arm();
    for _ in 0..200 {
        engine.step()?.into_iter().for_each(|event| all.add(event));
        if engine.is_idle() {
            let completed = |id| match all.remove(id) {
                Completion { end: Some(FinishReason::Failed(why)), .. } => Err(why),
                completion => Ok(completion.tokens),
            };
            return Ok(ids.into_iter().map(completed).collect());
        }
    }
    panic!("the engine does not come to an end")
}

/// Whichever call fails, all requests are completed with the same tokens; and where all fail, all are told so.
#[test]
fn an_engine_loses_no_request() -> Result<()> {
    for device in single_stream_devices() {
        let group = Faulty::new(None);
        let model = model(&device, &group)?;
        // A graph is captured before, and makes no call.
        let want = completed(&model, GraphChoice::Off, || {})?;
        assert!(want.iter().all(|want| want.is_ok()));
        let mut calls = 0;
        loop {
            let got = completed(&model, GraphChoice::Off, || group.after(calls, false))?;
            assert_eq!(got, want, "call {calls} fails on {:?}", device.location());
            if group.left.load(Ordering::SeqCst) >= 0 {
                break;
            }
            calls += if device.is_cpu() { 1 } else { 7 };
        }
        assert!(calls > 50, "{calls}");
        for calls in [0, 20, 45] {
            // Not before the requests are there: an engine begins with a pass of its own.
            group.after(-1, false);
            group.for_ever.store(false, Ordering::SeqCst);
            let got = completed(&model, GraphChoice::Off, || {
                group.after(calls, false);
                group.for_ever.store(true, Ordering::SeqCst);
            })?;
            let lost = got.iter().filter(|got| matches!(got, Err(why) if why.contains("a fault on purpose")));
            assert!(lost.count() > 0 && got.iter().zip(&want).all(|(got, want)| got.is_err() || got == want));
        }
    }
    Ok(())
}

/// A capture that fails at any call leaves the stream as it was.
#[test]
fn a_capture_that_fails_can_be_made_again() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let group = Faulty::new(None);
        let model = model(device, &group)?;
        for panics in [false, true] {
            let mut pool = model.new_sequences(2, 256)?;
            let (s, mut seen) = (pool.begin()?, vec![1, 2, 3]);
            group.after(1000, panics);
            model.feed_only(&mut pool, &[(s, &seen)])?;
            let of_a_pass = 1000 - group.left.load(Ordering::SeqCst);
            for calls in (0..).step_by(3) {
                group.after(calls, panics);
                let made = catch_unwind(AssertUnwindSafe(|| DecodeGraph::capture(&model, &mut pool, 2)));
                group.after(-1, false);
                seen.push(4);
                let what = format!("call {calls}, panics: {panics}");
                if let Ok(Ok(mut graph)) = made {
                    let logits = graph.step(&model, &mut pool, &[(s, 4)])?.squeeze(0)?.to_vec1()?;
                    assert_near(&logits, &want(&model, &seen)?, &what);
                    assert!(calls > 3 * (of_a_pass - 1), "each of four passes calls the group: {calls}");
                    break;
                }
                assert_near(&feed(&model, &mut pool, s, &[4])?, &want(&model, &seen)?, &what);
            }
        }
    }
    Ok(())
}

/// While one thread captures graphs, another one goes on with a pool of its own: its kernels run, and are in no graph.
#[test]
fn a_capture_takes_in_no_other_thread() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let model = &DEMO.model(DType::F32, device)?;
        let captured = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let other = scope.spawn(move || -> Result<usize> {
                let mut pool = model.new_sequences(1, 512)?;
                let mut steps = 0;
                while !captured.load(Ordering::SeqCst) || steps < 20 {
                    // Reading and dropping the logits is work too.
                    let _working = Working::new(device);
                    let (s, tokens) = (pool.begin()?, [3, 1, 4, 1, 5]);
                    let first = feed(model, &mut pool, s, &tokens)?;
                    let second = feed(model, &mut pool, s, &[9, 2])?;
                    pool.end(s)?;
                    assert_near(&first, &want(model, &tokens)?, "beside a capture");
                    assert_near(&second, &want(model, &[3, 1, 4, 1, 5, 9, 2])?, "beside a capture");
                    steps += 1;
                }
                Ok(steps)
            });
            let run = || -> Result<()> {
                for batch in [1, 2, 3, 4, 1, 2, 3, 4] {
                    let mut pool = model.new_sequences(4, 64)?;
                    let mut graph = DecodeGraph::capture(model, &mut pool, batch)?;
                    let s = pool.begin()?;
                    model.feed_only(&mut pool, &[(s, &[1, 2, 3])])?;
                    let logits = graph.step(model, &mut pool, &[(s, 4)])?.squeeze(0)?.to_vec1()?;
                    assert_near(&logits, &want(model, &[1, 2, 3, 4])?, "captured beside another thread");
                }
                Ok(())
            };
            let done = run();
            captured.store(true, Ordering::SeqCst);
            assert!(other.join().expect("no panic")? >= 20);
            done
        })?;
    }
    Ok(())
}

/// A graph of a quantised model holds the address of candle's buffer, which a wider product would move.
#[test]
fn a_wider_quantised_product_does_not_move_what_a_graph_reads() -> Result<()> {
    for device in &gpus(single_stream_devices()) {
        let config = DEMO.config()?;
        let model =
            CausalLm::loader(&config).quantize(Some(GgmlDType::Q8_0)).load(DEMO.weights(DType::F32, device)?)?;
        let mut pool = model.new_sequences(4, 64)?;
        let s = pool.begin()?;
        model.feed_only(&mut pool, &[(s, &[1, 2, 3])])?;
        let snapshot = pool.snapshot(s)?;
        let mut graph = DecodeGraph::capture(&model, &mut pool, 4)?;
        let before = graph.step(&model, &mut pool, &[(s, 4)])?.squeeze(0)?.to_vec1()?;
        let wide = Tensor::zeros((32, 1 << 17), DType::F32, device)?;
        let wide = QMatMul::from_qtensor(QTensor::quantize(&wide, GgmlDType::Q8_0)?)?;
        wide.forward(&Tensor::ones((8, 1 << 17), DType::F32, device)?)?;
        // Whatever was freed is written over.
        let _over: Vec<Tensor> =
            (10..24).map(|bits| Tensor::full(f32::NAN, 1 << bits, device)).collect::<Result<_>>()?;
        pool.restore(s, &snapshot)?;
        let after = graph.step(&model, &mut pool, &[(s, 4)])?.squeeze(0)?.to_vec1()?;
        assert_near(&after, &before, "after a wider product");
    }
    Ok(())
}

/// A value that is not finite is seen by its own token and later ones, and an infinite score is no zero.
#[test]
fn what_is_not_finite_reaches_who_sees_it() -> Result<()> {
    let rng = &mut Rng::new(5);
    for device in gpus(devices()) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for (dim, before, tokens) in [(64, 3, 1), (128, 0, 7), (256, 90, 16), (128, 5, 130), (256, 0, 300)] {
                let (heads, kv_heads, bad) = (4, 2, tokens / 2);
                let shape = |heads: usize| (1, tokens, heads, dim);
                let mut draw = |heads: usize| -> Result<Vec<f64>> { Ok(rng.normals(tokens * heads * dim)) };
                let (q, k, v) = (draw(heads)?, draw(kv_heads)?, draw(kv_heads)?);
                let run = |v: &[f64], k: &[f64]| -> Result<Vec<Vec<f64>>> {
                    let tensor = |x: &[f64], heads| {
                        Tensor::from_slice(x, shape(heads), &Device::Cpu)?.to_dtype(dtype)?.to_device(&device)
                    };
                    let kv = || Tensor::ones((1, kv_heads, 512, dim), dtype, &device);
                    let positions = Tensor::new(&[before as u32], &device)?;
                    let cache = AttentionCache::new(&kv()?, &kv()?, &positions)?;
                    let ones = Tensor::ones(dim, DType::F32, &device)?;
                    let frequencies = rotary_frequencies(&[1., 0.1], &device)?;
                    let options = PrepareOptions { eps: 1e-6, zero_centred: false };
                    let prepare = AttentionPrepare::new(&cache, &ones, &ones, &frequencies, options)?;
                    let q = prepare.forward(&tensor(&q, heads)?, &tensor(k, kv_heads)?, &tensor(v, kv_heads)?)?;
                    let o = AttentionDecode::new(&cache, None)?.forward(&q, None)?;
                    Ok(values(&o).chunks(heads * dim).map(<[f64]>::to_vec).collect())
                };
                let want = run(&v, &k)?;
                for value in [f64::NAN, f64::INFINITY] {
                    let what = format!("{value} in {dtype:?}, {dim}, {tokens} on {:?}", device.location());
                    let mut wrong = v.clone();
                    wrong[bad * kv_heads * dim + 1] = value;
                    let got = run(&wrong, &k)?;
                    for (token, (got, want)) in got.iter().zip(&want).enumerate() {
                        // The first kv head's queries.
                        let got = &got[..heads / kv_heads * dim];
                        match token < bad {
                            true => assert_eq!(*got, want[..got.len()], "token {token}, {what}"),
                            false => assert!(!got[1].is_finite(), "token {token}, {what}: {}", got[1]),
                        }
                    }
                    let mut wrong = k.clone();
                    wrong[bad * kv_heads * dim + 1] = value;
                    let got = run(&v, &wrong)?;
                    for (token, (got, want)) in got.iter().zip(&want).enumerate() {
                        let got = &got[..heads / kv_heads * dim];
                        match token < bad {
                            true => assert_eq!(*got, want[..got.len()], "token {token}, key, {what}"),
                            false => assert!(got.iter().any(|x| x.is_nan()), "token {token}, key, {what}"),
                        }
                    }
                }
            }
        }
    }
    Ok(())
}
