//! Steps of a run beside their parts put together by hand, and a trained adapter beside the model that serves.

use crate::families::{served, trained};
use crate::support::{config, data, files, options, run, variables, TEXT};
use anyhow::Result;
use candle_core::DType;
use candle_gdn_models::LoraAdapter;
use candle_gdn_models_testing::demo::DEMO;
use candle_gdn_testing::devices::{devices, rel_rms, values};
use candle_nn::ParamsAdamW;
use finetune::model::{cross_entropy, Model};
use finetune::optimizer::{accumulate, clip, AdamW, Gradients};
use finetune::train::Options;
use finetune::weights::Weights;
use std::collections::BTreeMap;

#[test]
fn steps_are_their_parts() -> Result<()> {
    for device in devices() {
        for full in [false, true] {
            let options = Options { clip: 0.05, weight_decay: 0.1, ..options(full) };
            let (config, mut data) = (config(DEMO)?, data(&options, TEXT)?);
            let mut run = run(options, DType::F32, &device)?;
            let weights = if full {
                Weights::all_variables(&files(DEMO), &config, DType::F32, &device)?
            } else {
                // The first values are random.
                let copies =
                    run.weights().variables().iter().map(|(name, x)| Ok((name.clone(), x.as_tensor().copy()?)));
                let copies = copies.collect::<Result<BTreeMap<_, _>>>()?;
                Weights::load(&files(DEMO), &config, DType::F32, &device)?.with_variables(copies)?
            };
            let first = variables(&run);
            let mut optimizer = AdamW::new(ParamsAdamW { weight_decay: 0.1, ..Default::default() });
            // A peak of 1e-3 after two steps.
            for (step, rate) in [5e-4, 1e-3].into_iter().enumerate() {
                let packs = [data.next(&device)?, data.next(&device)?];
                let tokens = packs[0].tokens() + packs[1].tokens();
                assert_ne!(packs[0].tokens(), packs[1].tokens(), "a mean of two means would be the same");
                let (mut gradients, mut loss) = (Gradients::new(), 0.);
                for pack in &packs {
                    // alpha / rank is 2.
                    let logits = Model::new(&config, 2., weights.builder())?.forward(&pack.inputs, &pack.sequences)?;
                    let part = (cross_entropy(&logits, &pack.targets)? / tokens as f64)?;
                    accumulate(&mut gradients, weights.variables(), &part.backward()?)?;
                    loss += part.to_scalar::<f32>()?;
                }
                let norm = clip(&mut gradients, 0.05)?;
                assert!(norm > 0.06, "nothing is clipped: {norm}");
                optimizer.params.lr = rate;
                optimizer.step(weights.variables(), &gradients)?;

                run.step()?;
                let got = run.steps()[step];
                assert_eq!((got.loss, got.gradient_norm, got.tokens), (loss, norm as f32, tokens), "step {step}");
                let want: Vec<_> = weights.variables().iter().map(|(name, x)| (name.clone(), values(x))).collect();
                assert!(variables(&run) == want, "step {step}, full {full}: other variables");
            }
            assert!(variables(&run) != first);
        }
    }
    Ok(())
}

#[test]
fn an_adapter_of_the_demo_is_served() -> Result<()> {
    for device in devices() {
        let mut run = run(Options { learning_rate: 1e-2, ..options(false) }, DType::F32, &device)?;
        while !run.is_done() {
            run.step()?;
        }
        let dir = tempfile::tempdir()?;
        run.save(dir.path())?;
        let (config, adapter) = (config(DEMO)?, LoraAdapter::open(dir.path())?);
        let ids: Vec<u32> = (1..30).map(|i| i * 31).collect();
        let want = trained(&run.model()?, &ids, &device)?;
        let error = |lora: Option<&LoraAdapter>| -> Result<f64> {
            Ok(rel_rms(&served(&config, &files(DEMO), lora, &ids, &device)?, &want))
        };
        let (with, without) = (error(Some(&adapter))?, error(None)?);
        assert!(with < 1e-4 && without > 100. * with, "error {with:e}, without the adapter {without:e}");
    }
    Ok(())
}
