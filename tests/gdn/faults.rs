//! Sizes past 32 bits, states that other threads drop, and errors that other code left unread. On a GPU of 40 GB and
//! more: elsewhere there is nothing to test.

use crate::random_layer::{layer, of_128, packed, rows};
use crate::support::{devices, gpus, rel_rms, values, Rng};
use candle_core::{DType, Device, Result, Tensor};
use candle_gdn::ops::{causal_conv1d, Gates, GdnStep, StepOptions};
use candle_gdn::{Slots, NO_SLOT};

/// candle counts the elements of a copy or a fill in 32 bits.
#[test]
fn states_of_more_than_32_bits() -> Result<()> {
    for device in gpus(devices()) {
        let config = of_128().with(|c| (c.num_key_heads, c.num_value_heads) = (16, 32));
        let (sequences, last) = (8192, 8191);
        let mut state = layer(&config, DType::BF16, &device, 1).new_state_as(sequences, DType::BF16)?;
        assert_eq!(state.recurrent().elem_count(), 1 << 32);
        let some = Tensor::ones((1, 32, 128, 128), DType::BF16, &device)?;
        let is = |state: &candle_gdn::GdnState, value: f64, what: &str| -> Result<()> {
            for row in [0, last] {
                let row = values(&state.recurrent().narrow(0, row, 1)?);
                assert!(row.iter().all(|x| *x == value), "{what}");
            }
            Ok(())
        };
        [0, last].iter().try_for_each(|row| state.recurrent().slice_set(&some, 0, *row))?;
        let snapshot = state.snapshot()?;
        is(&snapshot, 1., "snapshot")?;
        state.reset()?;
        is(&state, 0., "reset")?;
        state.restore(&snapshot)?;
        is(&state, 1., "restore")?;
    }
    Ok(())
}

/// The last run of a sequence may begin below 2^31 and end above it.
#[test]
fn a_convolution_of_nearly_2_to_the_31_tokens() -> Result<()> {
    for device in gpus(devices()) {
        for tokens in [i32::MAX as usize, i32::MAX as usize - 100] {
            let x = Tensor::zeros((1, tokens, 1), DType::BF16, &device)?;
            let end: Vec<f32> = (0..300).map(|i| (i % 17) as f32).collect();
            x.slice_set(&Tensor::from_slice(&end, (1, 300, 1), &device)?.to_dtype(DType::BF16)?, 1, tokens - 300)?;
            let weight = Tensor::new(&[[8f32, 4., 2., 1.]], &device)?;
            let state = Tensor::zeros((1, 3, 1), DType::BF16, &device)?;
            let y = causal_conv1d(&x, &weight, &state, None, false)?;
            let at = |i: usize| if i < 3 { 0. } else { f64::from(end[i - 3]) };
            let want: Vec<f64> = (3..303).map(|i| 8. * at(i - 3) + 4. * at(i - 2) + 2. * at(i - 1) + at(i)).collect();
            assert_eq!(values(&y.narrow(1, tokens - 300, 300)?), want, "{tokens} tokens");
            assert_eq!(values(&state), end[297..].iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
        }
    }
    Ok(())
}

/// Rows so far apart that the last one's q lies below 2^32 elements and its v does not.
#[test]
fn a_step_whose_last_row_crosses_32_bits() -> Result<()> {
    for device in gpus(devices()) {
        let (keys, vals, batch) = (2 * 128, 4 * 128, 65535);
        let channels = 2 * keys + vals;
        let stride = ((1usize << 32) - channels / 2) / (batch - 1) + 1;
        let wide = Tensor::zeros((batch, stride), DType::BF16, &device)?;
        let last = Tensor::from_vec(Rng::new(3).normals(channels), (1, channels), &Device::Cpu)?;
        let last = last.to_dtype(DType::BF16)?.to_device(&device)?;
        wide.narrow(0, batch - 1, 1)?.slice_set(&last, 1, 0)?;
        let run = |qkv: &Tensor| -> Result<Vec<f64>> {
            let batch = qkv.dim(0)?;
            let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &device);
            let gates =
                Gates { a: zeros(&[batch, 4])?, b: zeros(&[batch, 4])?, a_log: zeros(&[4])?, dt_bias: zeros(&[4])? };
            let norm = Tensor::ones(128, DType::F32, &device)?;
            let states = (Tensor::zeros((1, 3, channels), DType::BF16, &device)?, zeros(&[1, 4, 128, 128])?);
            let mut slots = vec![NO_SLOT; batch];
            slots[batch - 1] = 0;
            let step = GdnStep::new(gates, &norm, &states.0, &states.1, StepOptions::default())?;
            let step = step.with_slots(Slots::new(&slots, &device)?);
            let z = Tensor::ones((batch, vals), DType::BF16, &device)?;
            let weight = Tensor::ones((channels, 4), DType::BF16, &device)?;
            let out = step.forward(qkv, &z, &weight)?;
            Ok([values(&out.narrow(0, batch - 1, 1)?), values(&states.1)].concat())
        };
        let got = run(&wide.narrow(1, 0, channels)?)?;
        // Not by the same kernel: between convolution, rule and norm bf16 is rounded.
        let error = rel_rms(&got, &run(&last)?);
        assert!(error < 2e-2, "off by {error:e}");
    }
    Ok(())
}

/// `Device::new_cuda` gives each thread a stream. A state is freed in the order of the stream of the thread that drops
/// it: not before the kernels of the thread that used it are done.
#[test]
fn a_state_dropped_by_another_thread() -> Result<()> {
    for device in gpus(devices()) {
        let layer = layer(&of_128(), DType::BF16, &device, 2);
        let x: Vec<Vec<f32>> = rows(&mut Rng::new(8), 64, 64);
        let x = packed(&x, DType::BF16, &device).unsqueeze(1)?; // 64 sequences of one token
        let run = |given_away: bool| -> Result<Vec<f64>> {
            let mut state = layer.new_state(64)?;
            let mut y = x.clone();
            for _ in 0..400 {
                y = layer.forward(&x, &mut state)?;
            }
            if given_away {
                std::thread::scope(|scope| {
                    let taken = scope.spawn(|| -> Result<()> {
                        let elements = state.recurrent().elem_count();
                        drop(state);
                        // The memory that was freed, if it is free.
                        for _ in 0..8 {
                            drop(Tensor::full(f32::NAN, elements, &device)?);
                        }
                        device.synchronize()
                    });
                    taken.join().expect("no panic")
                })?;
            }
            Ok(values(&y))
        };
        let want = run(false)?;
        for _ in 0..5 {
            assert_eq!(run(true)?, want);
        }
    }
    Ok(())
}

/// An error that a call of somebody else left in the CUDA runtime is not the next launch's.
#[cfg(feature = "cuda")]
#[test]
fn an_error_of_somebody_else() -> Result<()> {
    extern "C" {
        fn cudaSetDevice(device: i32) -> i32;
    }
    for device in gpus(devices()) {
        let tensor = |shape: &[usize]| Tensor::ones(shape, DType::F32, &device);
        let (weight, state) = (tensor(&[8, 4])?, tensor(&[1, 3, 8])?);
        // SAFETY: there is no such device; the call only leaves an error.
        assert_ne!(unsafe { cudaSetDevice(12345) }, 0);
        causal_conv1d(&tensor(&[1, 5, 8])?, &weight, &state, None, true)?;
    }
    Ok(())
}
