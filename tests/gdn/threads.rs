//! States under several host threads.

use crate::layer::weights_for;
use crate::projections::{dense, fused, parts};
use crate::random_layer::{layer, of_128, packed, rows, small};
use crate::support::{devices, refused, values, Rng};
use candle_core::{DType, Device, Tensor};
use candle_gdn::{GatedDeltaNet, GdnState, InProjection, Slots, StatePool, TrainableGatedDeltaNet};
use std::sync::Mutex;
use std::thread::scope;

const THREADS: usize = 4;
const CALLS: [usize; 5] = [1, 70, 1, 16, 1];

#[test]
fn states_may_move_and_be_shared() {
    fn both<T: Send + Sync>() {}
    both::<GdnState>();
    both::<StatePool>();
    both::<GatedDeltaNet>();
    both::<Slots>();
}

fn inputs(hidden: usize) -> Vec<Vec<Vec<f32>>> {
    (0..THREADS as u64).map(|n| rows(&mut Rng::new(n), CALLS.iter().sum(), hidden)).collect()
}

/// y of every call, fed by `feed`.
fn run(x: &[Vec<f32>], device: &Device, mut feed: impl FnMut(Tensor) -> Tensor) -> Vec<Vec<f64>> {
    let mut first = 0;
    let call = |n: &usize| {
        first += n;
        let x = packed(&x[first - n..first], DType::F32, device).unsqueeze(0).unwrap();
        values(&feed(x))
    };
    CALLS.iter().map(call).collect()
}

/// What `f` gives of each of `all`, every one on a thread of its own.
fn at_once<T: Sync, R: Send>(all: &[T], f: impl Fn(usize, &T) -> R + Sync) -> Vec<R> {
    let f = &f;
    scope(|s| {
        let threads: Vec<_> = all.iter().enumerate().map(|(n, x)| s.spawn(move || f(n, x))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// On CUDA with one stream for all threads: candle's matrix products of all of them go through one cuBLAS handle, which
/// several streams must not use at the same time.
fn with_one_stream(device: Device) -> Device {
    match device.is_cuda() {
        true => Device::new_cuda_with_stream(0).unwrap(),
        false => device,
    }
}

/// One layer, a state for each thread, all at once.
#[test]
fn a_layer_serves_several_threads() {
    for device in devices().into_iter().map(with_one_stream) {
        let layer = layer(&of_128(), DType::F32, &device, 31);
        let x = inputs(64);
        let alone = |x: &Vec<Vec<f32>>| {
            let mut state = layer.new_state(1).unwrap();
            run(x, &device, |x| layer.forward(&x, &mut state).unwrap())
        };
        let want: Vec<_> = x.iter().map(alone).collect();
        for _ in 0..5 {
            assert!(at_once(&x, |_, x| alone(x)) == want);
        }
    }
}

/// One pool, its slots shared out among threads that take turns as they come.
#[test]
fn a_pool_behind_a_lock_serves_several_threads() {
    for device in devices() {
        let layer = layer(&of_128(), DType::F32, &device, 32);
        let x = inputs(64);
        let serve = |x: &Vec<Vec<f32>>, slot: u32, pool: &Mutex<StatePool>| {
            let slots = Slots::new(&[slot], &device).unwrap();
            run(x, &device, |x| layer.forward_slots(&x, None, &slots, &mut pool.lock().unwrap()).unwrap())
        };
        let want: Vec<_> = x.iter().map(|x| serve(x, 0, &Mutex::new(layer.new_pool(1).unwrap()))).collect();
        for _ in 0..5 {
            let pool = Mutex::new(layer.new_pool(THREADS).unwrap());
            assert!(at_once(&x, |n, x| serve(x, n as u32, &pool)) == want);
        }
    }
}

/// A state, a pool and a snapshot that go from thread to thread, a call each.
#[test]
fn a_state_goes_from_thread_to_thread() {
    for device in devices() {
        let layer = layer(&of_128(), DType::F32, &device, 33);
        let x = &inputs(64)[0];
        let want = {
            let mut state = layer.new_state(1).unwrap();
            run(x, &device, |x| layer.forward(&x, &mut state).unwrap())
        };
        let (mut state, mut pool) = (layer.new_state(1).unwrap(), layer.new_pool(2).unwrap());
        let slots = Slots::new(&[1], &device).unwrap();
        device.synchronize().unwrap(); // the slots, which are the caller's
        let mut first = 0;
        for (n, want) in CALLS.iter().zip(&want) {
            let rows = &x[first..first + n];
            first += n;
            let (layer, device, slots) = (&layer, &device, &slots);
            let (one, two) = (&mut state, &mut pool);
            scope(|s| {
                s.spawn(move || {
                    let x = packed(rows, DType::F32, device).unsqueeze(0).unwrap();
                    assert!(values(&layer.forward(&x, one).unwrap()) == *want, "the state");
                    assert!(values(&layer.forward_slots(&x, None, slots, two).unwrap()) == *want, "the pool");
                });
            });
            let snapshot = pool.snapshot(1).unwrap();
            let two = &mut pool;
            scope(|s| {
                s.spawn(move || {
                    two.zero(1).unwrap();
                    two.restore(0, &snapshot).unwrap();
                    two.copy(0, 1).unwrap();
                });
            });
        }
    }
}

/// Whatever allocates waits while another thread captures a graph, which would record it.
#[cfg(feature = "cuda")]
#[test]
fn allocations_wait_for_a_capture() {
    use crate::support::{gpus, single_stream_devices};
    use candle_gdn::ops::{multiply, Launch};
    use candle_gdn::{ConvWeight, CuSeqlens, DenseWeight, PoolOptions, RingSpans};
    use candle_nn::VarBuilder;
    for device in &gpus(single_stream_devices()) {
        let layer = &layer(&of_128(), DType::F32, device, 35);
        let ring = PoolOptions::default().ring();
        let [mut grown, pool] = [(); 2].map(|()| layer.new_pool_with(2, &ring).unwrap());
        let state = &layer.new_state(1).unwrap();
        let x = &Tensor::ones((64, 64), DType::F32, device).unwrap();
        let trained = TrainableGatedDeltaNet::load(&of_128(), VarBuilder::zeros(DType::F32, device)).unwrap();
        let mut separate = trained.parts().clone();
        // Joined for a look at their shapes.
        let thirds = [256, 256, 512].map(|rows| Tensor::zeros((rows, 4), DType::F32, device).unwrap());
        separate.conv_weight = ConvWeight::Separate(thirds);
        let capture = candle_gdn_core::device::cuda::capture("a test", device).unwrap();
        type Work<'a> = (&'static str, Box<dyn FnOnce() + Send + 'a>);
        let work: Vec<Work> = vec![
            ("boundaries", Box::new(|| drop(CuSeqlens::from_lengths(&[1, 2], device).unwrap()))),
            ("slots", Box::new(|| drop(Slots::new(&[1], device).unwrap()))),
            ("spans", Box::new(|| drop(RingSpans::new(3, device).unwrap()))),
            ("a state", Box::new(|| drop(layer.new_state(2).unwrap()))),
            ("a copy", Box::new(|| drop(GdnState::from_tensors(state.conv(), state.recurrent()).unwrap()))),
            ("a pool", Box::new(|| drop(layer.new_pool_with(2, &ring).unwrap()))),
            ("more slots", Box::new(|| grown.grow(5).unwrap())),
            ("a snapshot", Box::new(|| drop(pool.snapshot(1).unwrap()))),
            ("a weight", Box::new(|| drop(DenseWeight::new(x.clone()).unwrap()))),
            ("a product of cuBLAS", Box::new(|| drop(multiply(x, x, &Launch::default()).unwrap()))),
            (
                "a layer",
                Box::new(|| drop(GatedDeltaNet::load(&of_128(), VarBuilder::zeros(DType::F32, device)).unwrap())),
            ),
            ("a layer in training", Box::new(|| drop(TrainableGatedDeltaNet::new(&of_128(), separate).unwrap()))),
        ];
        scope(|s| {
            let threads: Vec<_> = work.into_iter().map(|(what, work)| (what, s.spawn(work))).collect();
            std::thread::sleep(std::time::Duration::from_millis(300));
            let early: Vec<_> =
                threads.iter().filter(|(_, thread)| thread.is_finished()).map(|(what, _)| *what).collect();
            drop(capture);
            assert!(early.is_empty(), "{early:?} did not wait");
        });
    }
}

#[test]
fn a_pool_of_another_device_is_refused() {
    let Some(gpu) = devices().into_iter().find(Device::is_cuda) else { return };
    let (here, there) = (layer(&small(), DType::F32, &Device::Cpu, 34), layer(&small(), DType::F32, &gpu, 34));
    let x = packed(&rows(&mut Rng::new(0), 1, 32), DType::F32, &gpu).unsqueeze(0).unwrap();
    let slots = Slots::new(&[0], &gpu).unwrap();
    let mut pool = here.new_pool(1).unwrap();
    let sentence = "GatedDeltaNet: pool: expected a tensor on Cuda";
    refused(there.forward_slots(&x, None, &slots, &mut pool), &[sentence, "got one on Cpu"]);
    let slots = Slots::new(&[0], &Device::Cpu).unwrap();
    let mut pool = there.new_pool(1).unwrap();
    refused(there.forward_slots(&x, None, &slots, &mut pool), &["GatedDeltaNet: slots: expected a tensor on Cuda"]);
    // Nor is a projection of another device taken.
    let (w, _) = weights_for(&small(), &gpu);
    let here_all = fused(&w).to_device(&Device::Cpu).unwrap();
    let apart = parts(&w, InProjection::Fused(dense(&here_all)), dense(&w["out_proj.weight"]));
    let sentence = &["GatedDeltaNet: in_proj: expected a weight on Cuda", "got one on Cpu"];
    refused(GatedDeltaNet::new(&small(), apart.clone()), sentence);
    refused(TrainableGatedDeltaNet::new(&small(), apart), sentence);
    refused(pool.restore(0, &here.new_state(1).unwrap()), &["StatePool: restore: conv: expected", "on Cpu"]);
}
