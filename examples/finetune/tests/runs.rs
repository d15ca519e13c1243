//! Packing, and runs that are interrupted.

use crate::support::{config, files, loss, options, run, run_on, variables, TEXT};
use anyhow::Result;
use candle_core::{DType, Device, IndexOp};
use candle_gdn_models_testing::demo::{Copy, DEMO};
use candle_gdn_models_testing::golden;
use candle_gdn_testing::devices::{devices, rel_rms, values};
use finetune::data::{sequences, Data, Pack, Position};
use finetune::model::Model;
use finetune::optimizer::{accumulate, Gradients};
use finetune::train::{Options, Run};
use finetune::weights::Weights;
use std::collections::BTreeMap;

/// The sequences of some prompts.
fn prompts() -> Result<Vec<Vec<u32>>> {
    let ids = (3..6).map(|i| Ok(golden::DEMO.prompt(i)?.ids)).collect::<Result<Vec<_>>>()?;
    assert!(ids.iter().all(|ids| ids.len() > 8));
    Ok(ids)
}

#[test]
fn nothing_crosses_a_border() -> Result<()> {
    for device in devices() {
        let config = config(DEMO)?;
        let weights = Weights::load(&files(DEMO), &config, DType::F32, &device)?;
        let model = Model::new(&config, 1., weights.builder())?;
        let ids = prompts()?;
        let logits = |ids: &[&[u32]]| -> Result<_> {
            let pack = Pack::new(ids, &device)?;
            Ok(model.forward(&pack.inputs, &pack.sequences)?)
        };
        let packed = logits(&[&ids[0], &ids[1], &ids[2]])?;
        let (first, second) = (ids[0].len() - 1, ids[1].len() - 1);
        let alone = logits(&[&ids[1]])?;
        let error = rel_rms(&values(&packed.i(first..first + second)?), &values(&alone));
        assert!(error < 1e-5, "packed and alone: {error:e}");
        // Another first sequence changes nothing after it, to the bit.
        let mut other = ids[0].clone();
        other.iter_mut().for_each(|id| *id = (*id + 7) % 1000);
        let changed = logits(&[&other, &ids[1], &ids[2]])?;
        assert_ne!(values(&changed.i(..first)?), values(&packed.i(..first)?));
        assert_eq!(values(&changed.i(first + second..)?), values(&packed.i(first + second..)?));
    }
    Ok(())
}

#[test]
fn a_pack_has_the_gradients_of_its_sequences() -> Result<()> {
    for device in devices() {
        let config = config(DEMO)?;
        let weights = Weights::all_variables(&files(DEMO), &config, DType::F32, &device)?;
        let ids = prompts()?;
        let gradients = |ids: &[&[u32]]| -> Result<BTreeMap<String, Vec<f64>>> {
            let pack = Pack::new(ids, &device)?;
            let sum = (loss(&config, 1., &weights, &pack)? * pack.tokens() as f64)?;
            let gradients = sum.backward()?;
            let own =
                weights.variables().iter().filter_map(|(name, x)| Some((name.clone(), values(gradients.get(x)?))));
            Ok(own.collect())
        };
        let packed = gradients(&ids.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        let mut sum = BTreeMap::<String, Vec<f64>>::new();
        for ids in &ids {
            for (name, gradient) in gradients(&[ids])? {
                let sum = sum.entry(name).or_insert_with(|| vec![0.; gradient.len()]);
                sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += x);
            }
        }
        assert_eq!(packed.keys().collect::<Vec<_>>(), sum.keys().collect::<Vec<_>>());
        for (name, gradient) in &packed {
            let error = rel_rms(gradient, &sum[name]);
            assert!(error < 1e-4, "{name}: {error:e}");
        }
    }
    Ok(())
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one() -> Result<()> {
    for device in devices() {
        for full in [false, true] {
            let mut whole = run(options(full), DType::F32, &device)?;
            while !whole.is_done() {
                whole.step()?;
            }
            let dir = tempfile::tempdir()?;
            let mut before = run(options(full), DType::F32, &device)?;
            before.step()?;
            before.step()?;
            before.save(dir.path())?;
            let mut after = run(options(full), DType::F32, &device)?.resume(dir.path())?;
            assert_eq!(after.steps(), before.steps());
            after.step()?;
            after.step()?;
            assert_eq!(after.steps(), whole.steps());
            assert_eq!(variables(&after), variables(&whole));
            assert!(whole.is_done() && whole.steps()[3].loss < whole.steps()[0].loss, "{:?}", whole.steps());
        }
    }
    Ok(())
}

#[test]
fn another_run_is_not_resumed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let resume = |options: Options| -> Result<Run> { run(options, DType::F32, &Device::Cpu)?.resume(dir.path()) };
    let Err(error) = resume(options(false)) else { panic!("there is no run") };
    assert!(format!("{error:#}").contains("training_state.safetensors"), "{error:#}");
    run(options(false), DType::F32, &Device::Cpu)?.save(dir.path())?;
    resume(options(false))?;
    let Err(error) = resume(Options { revision: None, ..options(false) }) else { panic!("another revision") };
    assert!(error.to_string().contains("revision: expected \"v1\" as in the run before, got null"), "{error:#}");
    let slower = resume(Options { learning_rate: 1e-4, steps: 9, warmup: 0, ..options(false) })?;
    assert!(!slower.is_done());
    // Other weights of the same shapes under the same name.
    let copy = Copy::new();
    copy.weights(|all| {
        let name = "model.embed_tokens.weight";
        all.insert(name.into(), (&all[name] * 0.5).expect("a tensor"));
    });
    let Err(error) = run_on(&copy.arg(), TEXT, options(false), DType::F32, &Device::Cpu)?.resume(dir.path()) else {
        panic!("another model")
    };
    assert!(error.to_string().contains("--model: expected the weights of the run before"), "{error:#}");
    Ok(())
}

/// In bf16 the variables and their gradients stay in f32.
#[test]
fn bf16_is_near() -> Result<()> {
    for device in devices() {
        let (config, ids) = (config(DEMO)?, prompts()?);
        let pack = Pack::new(&ids.iter().map(Vec::as_slice).collect::<Vec<_>>(), &device)?;
        let pass = |dtype: DType| -> Result<(f64, Vec<f64>)> {
            let weights = Weights::all_variables(&files(DEMO), &config, dtype, &device)?;
            let loss = loss(&config, 1., &weights, &pack)?;
            let mut gradients = Gradients::new();
            accumulate(&mut gradients, weights.variables(), &loss.backward()?)?;
            assert!(gradients.values().all(|gradient| gradient.dtype() == DType::F32));
            Ok((values(&loss)[0], gradients.values().flat_map(values).collect()))
        };
        let ((want, wide), (got, narrow)) = (pass(DType::F32)?, pass(DType::BF16)?);
        let error = rel_rms(&narrow, &wide);
        println!("bf16: loss {got}, in f32 {want}, relative error of the gradients {error:e}");
        assert!((got / want - 1.).abs() < 0.02 && error < 0.15, "loss {got}, in f32 {want}, gradients {error:e}");
    }
    Ok(())
}

#[test]
fn sequences_come_once_an_epoch() -> Result<()> {
    let sequences: Vec<Vec<u32>> = (0..7u32).map(|i| (0..3 + i % 3).map(|t| 10 * i + t).collect()).collect();
    let mut data = Data::new(sequences.clone(), 6, 3);
    let mut epochs = [vec![], vec![]];
    let mut resumed = None;
    loop {
        let pack = data.next(&Device::Cpu)?;
        let Position { epoch, used } = data.position();
        if epoch == 2 {
            break;
        }
        assert!(pack.tokens() <= 6);
        if let Some(data) = &mut resumed {
            let next: &Pack = &Data::next(data, &Device::Cpu)?;
            assert_eq!(next.inputs.to_vec1::<u32>()?, pack.inputs.to_vec1::<u32>()?);
        } else if epoch == 1 && used < 7 {
            let mut data = Data::new(sequences.clone(), 6, 3);
            data.seek(Position { epoch, used });
            resumed = Some(data);
        }
        let (inputs, targets) = (pack.inputs.to_vec1::<u32>()?, pack.targets.to_vec1::<u32>()?);
        assert_eq!(targets, inputs.iter().map(|id| id + 1).collect::<Vec<_>>());
        epochs[epoch as usize].extend(inputs);
    }
    assert!(resumed.is_some());
    assert_ne!(epochs[0], epochs[1], "each epoch has its order");
    let mut all: Vec<u32> = sequences.iter().flat_map(|ids| ids[..ids.len() - 1].to_vec()).collect();
    all.sort_unstable();
    for mut epoch in epochs {
        epoch.sort_unstable();
        assert_eq!(epoch, all);
    }
    Ok(())
}

#[test]
fn documents_become_sequences() -> Result<()> {
    let tokenizer = tokenizers::Tokenizer::from_file(format!("{DEMO}/tokenizer.json")).map_err(anyhow::Error::msg)?;
    let ids = |text: &str| tokenizer.encode(text, false).expect("tokens").get_ids().to_vec();
    let (long, short) = (ids("In the beginning God created the heaven and the earth."), ids("Amen"));
    let text = "In the beginning God created the heaven and the earth.\n<|endoftext|>\n \n<|endoftext|>\nAmen\n";
    let [long, short] = [long, short].map(|ids| [&ids[..], &[0]].concat());
    assert_eq!(sequences(text, &tokenizer, 100)?, [long.clone(), short.clone()]);
    let parts = sequences(text, &tokenizer, 4)?;
    let joined: Vec<u32> = parts[..parts.len() - 1].iter().flat_map(|ids| ids[..ids.len() - 1].to_vec()).collect();
    assert_eq!(joined, long[..long.len() - 1]);
    assert!(parts.iter().all(|ids| (2..=5).contains(&ids.len())));
    assert_eq!(parts[0][4], parts[1][0]);
    let error = sequences(" \n", &tokenizer, 4).expect_err("no text");
    assert!(error.to_string().contains("at least 2 tokens"), "{error}");
    Ok(())
}
