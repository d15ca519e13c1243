//! Ranks that go, at every call that they make together: the others get an error, and none waits for ever.

use crate::faults::Faulty;
use crate::parallel::{four_heads, parts_of};
use candle_core::Result;
use candle_gdn_models::{
    CausalLm, Collective, Engine, EngineHandle, EngineOptions, Followers, LocalRank, Request, Submission,
};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

/// A second rank that goes at a call.
struct Death {
    /// Calls before it in a pass.
    calls: isize,
    /// It makes no call any more, but its thread and all it has stay.
    stays: bool,
    /// The other one must have its error within.
    limit: Duration,
}

impl Death {
    /// Whether a pass has so many calls. Either way the first rank gets an error in this pass or in the next.
    fn of_two<R: Collective + 'static>(
        &self,
        make: impl Fn(usize) -> Result<R> + Sync,
        load: impl Fn(Arc<dyn Collective>) -> Result<CausalLm> + Sync,
    ) -> Result<bool> {
        let (done, first_is_done) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let (make, load) = (&make, &load);
            let second = scope.spawn(move || -> Result<bool> {
                let group = Faulty::new(Some(Arc::new(make(1)?)));
                let model = load(group.clone())?;
                let mut pool = model.new_sequences(1, 64)?;
                let s = pool.begin()?;
                model.feed(&mut pool, &[(s, &[3, 1, 4])])?;
                group.after(self.calls, false);
                let gone = model.feed(&mut pool, &[(s, &[1])]).is_err();
                if self.stays {
                    // Until the other end of the channel is dropped.
                    let _ = first_is_done.recv();
                }
                Ok(gone)
            });
            let model = load(Arc::new(make(0)?))?;
            let mut pool = model.new_sequences(1, 64)?;
            let s = pool.begin()?;
            model.feed(&mut pool, &[(s, &[3, 1, 4])])?;
            let start = Instant::now();
            let lost = [1, 5].iter().find_map(|token| model.feed(&mut pool, &[(s, &[*token])]).err());
            let (lost, took) = (lost.expect("an error").to_string(), start.elapsed());
            drop(done);
            let what = format!("gone at call {}, stays: {}", self.calls, self.stays);
            assert!(lost.contains("one is gone") || lost.contains("one did not come"), "{what}: {lost}");
            assert!(took < self.limit, "{what}: {took:?}");
            second.join().expect("no panic")
        })
    }
}

#[test]
fn a_thread_that_goes_at_any_call_is_an_error() -> Result<()> {
    let tiny = four_heads();
    let mut calls = 0;
    loop {
        let groups = std::sync::Mutex::new(LocalRank::group(2).into_iter().map(Some).collect::<Vec<_>>());
        let make = |number: usize| Ok(groups.lock().expect("no panic")[number].take().expect("made once"));
        let death = Death { calls, stays: false, limit: Duration::from_secs(30) };
        if !death.of_two(make, |group| parts_of(&tiny, group))? {
            break;
        }
        calls += 1;
    }
    assert!(calls > 9, "four layers with two sums each, the embedding, the logits: {calls}");
    Ok(())
}

/// The engine does not go on to answer all requests with errors: `drive` returns.
#[test]
fn an_engine_ends_with_its_group() -> Result<()> {
    let (tiny, mut ranks) = (four_heads(), LocalRank::group(2));
    let (second, first) = (ranks.pop(), ranks.remove(0));
    let model = parts_of(&tiny, Arc::new(first))?;
    drop(second);
    let mut engine = Engine::new(&model, EngineOptions::new(1, 64))?;
    engine.submit(Request::new(vec![3, 1, 4], 5))?;
    let lost = engine.step().expect_err("an error").to_string();
    assert!(lost.contains("one is gone"), "{lost}");
    let ((handle, messages), (sender, events)) = (EngineHandle::new(), mpsc::channel());
    handle.send(Submission {
        request: Box::new(|_| Ok(Request::new(vec![3, 1, 4], 5))),
        answer: Box::new(|id| id.is_ok()),
        events: Box::new(move |new| sender.send(new).is_ok()),
    })?;
    let engine = Engine::new(&model, EngineOptions::new(1, 64))?;
    let lost = messages.drive(engine, Followers::default(), ()).expect_err("an error").to_string();
    assert!(lost.contains("one is gone"), "{lost}");
    assert!(events.iter().next().is_none(), "the request has no end here");
    Ok(())
}

/// Whichever call of the second rank fails, while it and its thread stay: both engines end, or all requests do.
#[test]
fn a_rank_whose_pass_fails_ends_all() -> Result<()> {
    let (tiny, limit) = (four_heads(), Duration::from_secs(30));
    for calls in (0..).step_by(3) {
        let mut ranks = LocalRank::group(2);
        let (second, first) =
            (Faulty::new(ranks.pop().map(|rank| Arc::new(rank) as Arc<dyn Collective>)), ranks.remove(0));
        let ((handle, messages), (leads, mut follows)) = (EngineHandle::new(), Followers::new(1));
        let ((done, ends), follower) = (mpsc::channel(), follows.pop().expect("a follower"));
        let (faulty, model, sender) = (second.clone(), tiny.clone(), done.clone());
        std::thread::spawn(move || {
            let run = || {
                let mut engine = Engine::new(parts_of(&model, faulty.clone())?, EngineOptions::new(2, 64))?;
                faulty.after(calls, false);
                follower.follow(&mut engine)
            };
            sender.send(run().map_err(|e| e.to_string()))
        });
        let model = tiny.clone();
        std::thread::spawn(move || {
            let engine =
                parts_of(&model, Arc::new(first)).and_then(|part| Engine::new(part, EngineOptions::new(2, 64)));
            done.send(engine.and_then(|engine| messages.drive(engine, leads, ())).map_err(|e| e.to_string()))
        });
        for n in 0..3 {
            drop(handle.send(Submission {
                request: Box::new(move |_| Ok(Request::new(vec![3 + n, 1, 4], 3))),
                answer: Box::new(|id| id.is_ok()),
                events: Box::new(|_| true),
            }));
        }
        drop(handle);
        let ends = [(); 2].map(|()| ends.recv_timeout(limit).unwrap_or_else(|_| panic!("call {calls}: a rank waits")));
        if !second.disarm() {
            assert!(calls > 60 && ends.iter().all(|end| end.is_ok()), "{calls}: {ends:?}");
            break;
        }
        let said = |what: &str| ends.iter().any(|end| end.as_ref().is_err_and(|why| why.contains(what)));
        assert!(said("a fault on purpose") && (said("one is gone") || said("one has ended")), "call {calls}: {ends:?}");
    }
    Ok(())
}

#[cfg(feature = "nccl")]
mod gpus {
    use super::*;
    use crate::golden::DEMO;
    use crate::sequences::{assert_near, want};
    use crate::support::{gpus, single_stream_devices};
    use candle_core::{DType, Device, Tensor};
    use candle_gdn_models::{shard_of, DecodeGraph, NcclId, NcclRank};

    /// How long a GPU waits for another one: longer than one that lives ever takes, on a machine busy with other tests too.
    const LIMIT: Duration = Duration::from_secs(5);

    fn are_two() -> bool {
        let count = candle_core::cuda_backend::cudarc::driver::CudaContext::device_count().unwrap_or(0);
        let two = count >= 2 && !gpus(single_stream_devices()).is_empty();
        if !two {
            candle_gdn_testing::skipped::skipped("fewer than two GPUs");
        }
        two
    }

    fn part(device: &Device, group: Arc<dyn Collective>) -> Result<CausalLm> {
        let config = DEMO.config()?;
        let weights = shard_of(DEMO.weights(DType::F32, device)?, &config, &*group)?;
        CausalLm::loader(&config).group(group).load(weights)
    }

    /// It may go with all it has, or stay and call no more.
    #[test]
    fn a_gpu_that_goes_at_any_call_is_an_error() -> Result<()> {
        if !are_two() {
            return Ok(());
        }
        let devices = [0, 1].map(|number| candle_gdn::single_stream_device(number).expect("a GPU"));
        for calls in 0.. {
            let mut of_a_pass = true;
            for stays in [false, true] {
                let id = NcclId::new()?;
                let make = |number: usize| NcclRank::new_within(LIMIT * 10, id, number, 2, &devices[number]);
                let make = |number: usize| Ok(make(number)?.with_limit(LIMIT));
                let death = Death { calls, stays, limit: LIMIT * 5 };
                of_a_pass = death.of_two(make, |group| part(&devices[group.rank()], group))?;
            }
            if !of_a_pass {
                assert!(calls > 9, "two sums a layer, the embedding, the logits: {calls}");
                break;
            }
        }
        Ok(())
    }

    /// And those that are there can still meet.
    #[test]
    fn a_gpu_that_never_comes_is_an_error() -> Result<()> {
        for device in &gpus(single_stream_devices()) {
            let start = Instant::now();
            let alone = NcclRank::new_within(LIMIT, NcclId::new()?, 0, 2, device).expect_err("an error").to_string();
            assert!(alone.contains("expected all 2 ranks to come"), "{alone}");
            assert!(start.elapsed() < LIMIT * 5, "{:?}", start.elapsed());
            let one = NcclRank::new(NcclId::new()?, 0, 1, device)?;
            let x = Tensor::new(&[1f32, 2.], device)?;
            assert_eq!(one.all_reduce(&x)?.to_vec1::<f32>()?, [1., 2.]);
        }
        Ok(())
    }

    /// Before the first call, as while weights are loaded, and between two: a rank that waits for nobody may work for longer than it
    /// would wait.
    #[test]
    fn a_gpu_that_works_without_calls_is_not_lost() -> Result<()> {
        let wait = Duration::from_millis(200);
        for device in &gpus(single_stream_devices()) {
            let one = NcclRank::new(NcclId::new()?, 0, 1, device)?.with_limit(wait);
            let (x, wide) = (Tensor::new(&[1f32, 2.], device)?, Tensor::ones((4096, 4096), DType::F32, device)?);
            for _ in 0..2 {
                std::thread::sleep(wait * 5);
                let start = Instant::now();
                while start.elapsed() < wait * 3 {
                    let products = [(); 20].map(|()| wide.matmul(&wide));
                    products.into_iter().collect::<Result<Vec<_>>>()?;
                    device.synchronize()?;
                }
                let sum = one.all_reduce(&x)?;
                one.settle()?;
                assert_eq!(sum.to_vec1::<f32>()?, [1., 2.]);
            }
        }
        Ok(())
    }

    /// A rank that goes between two passes; and a model may go before its graph.
    #[test]
    fn a_gpu_that_goes_is_an_error() -> Result<()> {
        if !are_two() {
            return Ok(());
        }
        let id = NcclId::new()?;
        let rank = |number: usize| -> Result<()> {
            let device = candle_gdn::single_stream_device(number)?;
            let model = part(&device, Arc::new(NcclRank::new(id, number, 2, &device)?.with_limit(LIMIT)))?;
            let mut pool = model.new_sequences(2, 64)?;
            let (s, prompt) = (pool.begin()?, [3, 1, 4, 1, 5]);
            let mut feed = |tokens: &[u32]| model.feed(&mut pool, &[(s, tokens)])?.squeeze(0)?.to_vec1();
            assert_near(&feed(&prompt)?, &want(&DEMO.model(DType::F32, &device)?, &prompt)?, "two GPUs");
            let mut graph = DecodeGraph::capture(&model, &mut pool, 1)?;
            graph.step(&model, &mut pool, &[(s, 9)])?;
            if number == 0 {
                let start = Instant::now();
                let lost = model.feed(&mut pool, &[(s, &[2])]).expect_err("an error").to_string();
                assert!(lost.contains("one did not come"), "{lost}");
                assert!(start.elapsed() < LIMIT * 5, "{:?}", start.elapsed());
                let again = graph.step(&model, &mut pool, &[(s, 2)]).expect_err("an error").to_string();
                assert!(again.contains("failed half-way") || again.contains("one did not come"), "{again}");
            }
            drop(model);
            drop(graph);
            Ok(())
        };
        std::thread::scope(|scope| {
            let rank = &rank;
            let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
            ranks.map(|rank| rank.join().expect("no panic")).into_iter().collect()
        })
    }
}
