//! Places of outputs from pass to pass, on a GPU.

use super::super::apply1;
use super::super::pointers::{read, stream_of};
use super::super::{testing, Launch};
use super::*;
use candle_core::{CpuStorage, CustomOp1, Layout};

/// Copies its input, a whole tensor in f32, as a kernel of an arena would write it.
struct Copy<'a>(&'a Launch);

impl CustomOp1 for Copy<'_> {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("copy: expected a CUDA tensor")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
        let (stream, bytes) = (&*stream_of(x)?, layout.shape().elem_count() * 4);
        let mut out = alloc(self.0.arena.as_ref(), x, layout.dims())?;
        let from = read(x, stream)?.at::<c_void>(layout.start_offset(), 4) as u64;
        let to = write(&mut out, stream)?.at::<c_void>(0, 4) as u64;
        // SAFETY: both hold so many bytes.
        unsafe { memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.map_err(Error::wrap)?;
        Ok((out, layout.shape().clone()))
    }
}

fn copy(x: &Tensor, launch: &Launch) -> Tensor {
    apply1(&Copy(launch), launch.arena.as_ref(), ("x", x)).unwrap()
}

fn address(tensor: &Tensor) -> u64 {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { unreachable!("a tensor on CUDA") };
    let stream = stream_of(storage).unwrap();
    let pointer = read(storage, &stream).unwrap();
    pointer.at::<c_void>(0, 4).addr() as u64
}

/// `[rows, 64]` of numbers, no two rows alike.
fn numbers(rows: usize, seed: f32, device: &Device) -> Tensor {
    let values: Vec<f32> = (0..rows * 64).map(|i| (seed + i as f32 * 0.61).sin()).collect();
    Tensor::from_vec(values, (rows, 64), device).unwrap()
}

#[test]
fn passes_write_the_same_places() {
    let Some(device) = testing::device() else { return };
    let arena = Arena::new(&device).unwrap();
    let placed = Launch { overlap: false, arena: Some(arena.clone()) };
    let values = |x: &Tensor| x.to_vec2::<f32>().unwrap();
    let (mut places, mut undone) = (vec![], vec![]);
    for pass in 0..3 {
        let x = numbers(3, pass as f32, &device);
        let want = values(&x);
        let mut here = vec![];
        arena.begin_pass();
        // Two layers later it is the first one's place again; another shape has a place of its own.
        for layer in 0..4 {
            placed.next_layer();
            let y = copy(&x, &placed);
            let z = copy(&y, &placed);
            assert!(values(&y) == want && values(&z) == want, "pass {pass}, layer {layer}");
            copy(&x.narrow(0, 0, 2 - layer % 2).unwrap(), &placed);
            // An op that does not run after all leaves its place to the next pass.
            let taken = {
                let (storage, _) = x.storage_and_layout();
                let Storage::Cuda(storage) = &*storage else { unreachable!("a tensor on CUDA") };
                alloc(Some(&arena), storage, &[3, 64]).unwrap()
            };
            match pass {
                1 => undo(Some(&arena), taken).unwrap(),
                _ => undone.push(address(&finish(Some(&arena), taken, Shape::from((3, 64))).unwrap())),
            }
            here.extend([address(&y), address(&z)]);
        }
        assert_eq!(here[..4], here[4..]);
        places.push(here);
    }
    assert_eq!(places[0], places[1]);
    assert_eq!(places[1], places[2]);
    assert_eq!(undone[..4], undone[4..]);
    // Without the arena nothing is placed.
    assert_ne!(address(&copy(&numbers(3, 0.1, &device), &Launch::default())), places[0][0]);
}

/// An output that is held for longer than two layers reads as NaN, in builds that check.
#[test]
#[cfg(debug_assertions)]
fn an_output_held_too_long_is_nan() {
    let Some(device) = testing::device() else { return };
    let arena = Arena::new(&device).unwrap();
    let launch = Launch { overlap: false, arena: Some(arena.clone()) };
    arena.begin_pass();
    let y = copy(&numbers(3, 0.3, &device), &launch);
    let first = |y: &Tensor| y.to_vec2::<f32>().unwrap()[0][0];
    launch.next_layer();
    assert!(first(&y).is_finite());
    launch.next_layer();
    assert!(first(&y).is_nan());
}
