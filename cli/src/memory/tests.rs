use super::{Checkpoint, DeviceLocation, Run};
use crate::args::Args;
use crate::plan::Plan;
use anyhow::Result;
use candle_core::quantized::GgmlDType;
use candle_gdn_models::DraftHeadChoice;
use candle_gdn_models_testing::gguf_writer::demo;
use clap::Parser;

const GIB: u64 = 1 << 30;

/// What `generate` needs on a GPU with these arguments for prompts of these lengths, and what it would say with `free` bytes.
fn on_gpu(args: &[&str], prompts: &[usize], free: u64) -> Result<(u64, String)> {
    of_run(&[&["--load-format", "dummy"], args].concat(), prompts, free)
}

fn of_run(args: &[&str], prompts: &[usize], free: u64) -> Result<(u64, String)> {
    let args = Args::parse_from([&["generate"], args].concat());
    let checkpoint = Checkpoint::find(&args.model)?;
    let config = checkpoint.config()?;
    let prompts: Vec<Vec<u32>> = prompts.iter().map(|len| vec![0; *len]).collect();
    let draft_head = args.run.mtp == DraftHeadChoice::On;
    let room = Plan::new(&args, &config, draft_head, &prompts).room(draft_head);
    let device = DeviceLocation::Cuda { gpu_id: 0 };
    let run = Run { args: args.model.clone(), checkpoint: &checkpoint, config: &config, room, device, ranks: 1 };
    Ok((run.bytes()?.total(), run.advice(free)?))
}

fn of_4b(args: &[&str]) -> Result<u64> {
    Ok(on_gpu(&[&["--model", "qwen3.5-4b"], args].concat(), &[12], u64::MAX)?.0)
}

/// Rings hold up to 15 drafts and the token before them; a kernel that was chosen has no rings. Each draft has logits besides.
#[test]
fn drafts_take_states_where_they_do_not_fit_into_rings() -> Result<()> {
    let plain = of_4b(&[])?;
    let logits = |drafts: u64| drafts * 248320 * 6;
    assert_eq!([of_4b(&["--draft", "4"])?, of_4b(&["--draft", "15"])?], [4, 15].map(|n| plain + logits(n)));
    assert!(of_4b(&["--draft", "16"])? > plain + logits(16));
    let chosen = |args: &[&str]| of_4b(&[&["--algo", "recurrent"], args].concat());
    let without_rings = chosen(&[])?;
    let of_states = chosen(&["--draft", "4"])? - without_rings - logits(4);
    assert!(without_rings < plain && of_states > 0);
    let of_head = of_4b(&["--mtp", "on"])? - plain;
    assert!(of_head > logits(7));
    assert_eq!(chosen(&["--mtp", "on"])? - without_rings, of_head + of_states);
    Ok(())
}

/// Of many sequences with drafts more rows are verified than prompts may have.
#[test]
fn drafts_of_many_sequences_are_rows_of_a_pass() -> Result<()> {
    let of = |draft: &str, chunk: &str| {
        let args = ["--model", "qwen3.5-4b", "--draft", draft, "--prefill-chunk", chunk];
        Ok::<_, anyhow::Error>(on_gpu(&args, &[500; 64], u64::MAX)?.0)
    };
    let logits = |drafts: u64| 64 * drafts * 248320 * 6;
    assert!(of("15", "256")? > of("0", "256")? + logits(15));
    assert_eq!(of("15", "256")?, of("15", "1024")?);
    assert_eq!(of("3", "1024")?, of("0", "1024")? + logits(3));
    Ok(())
}

/// From 257 tokens of a pass on, all packed experts of a layer are made dense at once: 256 of three matrices 512 by 2048 in 16 bits.
#[test]
fn packed_experts_are_unpacked_for_many_tokens() -> Result<()> {
    let of = |args: &[&str], tokens| {
        let args = [&["--model", "qwen3.5-35b-a3b", "-n", "1"], args].concat();
        Ok::<_, anyhow::Error>(on_gpu(&args, &[tokens], u64::MAX)?.0)
    };
    let (experts, q4k) = (256 * 3 * 512 * 2048 * 2, ["--quantize", "q4k"]);
    let more = of(&q4k, 300)? - of(&q4k, 100)?;
    assert!(more >= experts && more < experts + (128 << 20), "{more}");
    // As 16-bit ones, or in a pass of fewer tokens, they are not.
    assert!(of(&[], 300)? - of(&[], 200)? < 64 << 20);
    let chunked = [&q4k[..], &["--prefill-chunk", "256"]].concat();
    assert!(of(&chunked, 300)? - of(&chunked, 200)? < 64 << 20);
    Ok(())
}

/// What is not quantised in a file can be.
#[test]
fn smaller_types_are_offered_for_gguf_files() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("demo.gguf");
    let model = path.display().to_string();
    demo().write(&path)?;
    let run = |more: &[&str], free| of_run(&[&["--model", &model, "--mtp", "off"], more].concat(), &[12], free);
    let (quantised, _) = run(&["--quantize", "q8_0"], u64::MAX)?;
    assert!(run(&[], quantised)?.1.contains("--quantize q8_0"));
    demo().quantized(GgmlDType::Q8_0).write(&path)?;
    let (need, advice) = run(&[], 1 << 20)?;
    assert!(need < quantised && advice.starts_with("no option makes it fit"), "{advice}");
    assert!(!advice.contains("--quantize"), "{advice}");
    Ok(())
}

#[test]
fn the_page_has_these_figures() -> Result<()> {
    let [whole, quantised] = [&["--mtp", "on"][..], &["--mtp", "on", "--quantize", "q4k"]].map(of_4b);
    let [whole, quantised] = [whole?, quantised?].map(|bytes| bytes as f64 / GIB as f64);
    let says = format!("`Qwen/Qwen3.5-4B` needs {whole:.1} GiB, or {quantised:.1} GiB with `--quantize q4k`");
    assert!(include_str!("../../../README.md").contains(&says), "{says}");
    Ok(())
}

/// Cards of 8 to 24 GB: what `generate` does by default fits, or it says with which options it would, and then it does.
#[test]
fn small_cards_hold_the_defaults_or_what_is_advised() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let nine = folder.path().join("9b.json");
    let mut config: serde_json::Value =
        serde_json::from_str(include_str!("../../../examples/generate/configs/qwen3.5-4b.json"))?;
    for (key, value) in [("hidden_size", 4096), ("intermediate_size", 12288)] {
        config[key] = value.into();
    }
    config["tie_word_embeddings"] = false.into();
    std::fs::write(&nine, config.to_string())?;
    let nine = nine.display().to_string();
    let models: [&[&str]; 6] = [
        &["--model", "qwen3.5-4b"],
        &["--model", "qwen3.5-4b", "--quantize", "q4k"],
        &["--model", &nine, "--quantize", "q4k"],
        &["--model", "qwen3.5-27b", "--quantize", "q4k"],
        &["--model", "qwen3.5-35b-a3b", "--quantize", "q4k"],
        &["--model", "qwen3.5-35b-a3b"],
    ];
    let (one, many, talk): (&[usize], Vec<usize>, &[usize]) = (&[12], vec![500; 16], &[]);
    let uses: [(&[&str], &[usize]); 4] =
        [(&[], one), (&[], &many), (&["--draft", "4"], &many), (&["--interactive"], talk)];
    let (mut whole, mut advised, mut impossible) = (0, 0, 0);
    for (model, (options, prompts)) in models.iter().flat_map(|model| uses.iter().map(move |of| (model, of))) {
        for card in [8, 12, 16, 24] {
            // The driver and the desktop take some.
            let free = card * GIB - GIB / 2;
            let args = [model, *options].concat();
            let (need, advice) = on_gpu(&args, prompts, free)?;
            println!(
                "{} {} of {card} GB: {:.1} GiB; {advice}",
                args.join(" "),
                prompts.len(),
                need as f64 / GIB as f64
            );
            if need <= free {
                whole += 1;
                continue;
            }
            let Some(advice) = advice.strip_prefix("it fits with ") else {
                assert!(advice.starts_with("no option makes it fit: the weights alone take "), "{advice}");
                // Nothing smaller is offered, so nothing smaller must fit.
                let least = ["--quantize", "q4k", "--batch", "1", "--prefix-cache", "0", "--prefill-chunk", "256"];
                let model = &model[..2];
                let (need, _) = on_gpu(&[model, &least].concat(), &prompts[..prompts.len().min(1)], free)?;
                assert!(need + GIB > free, "{args:?} on {card} GB: {need}");
                impossible += 1;
                continue;
            };
            for way in advice.split(", or with ") {
                let followed: Vec<&str> = args.iter().copied().chain(way.split(' ')).collect();
                // An option is given once: the last counts.
                let quantized = way.contains("--quantize") && model.len() > 2;
                assert!(!quantized, "{way}: there is no smaller type than q4k");
                let (need, _) = on_gpu(&followed, prompts, free)?;
                assert!(need <= free, "{args:?} on {card} GB: {way} needs {need}");
            }
            advised += 1;
        }
    }
    println!("{whole} whole, {advised} advised, {impossible} impossible");
    assert!(whole > 20 && advised > 5 && impossible > 5, "{whole} whole, {advised} advised, {impossible} impossible");
    Ok(())
}

/// A talk is on one device, and so is a text that is scored.
#[test]
fn ranks_are_offered_for_prompts() -> Result<()> {
    let advice = |more: &[&str]| on_gpu(&[&["--model", "qwen3.5-4b"], more].concat(), &[12], 1 << 20);
    assert!(advice(&[])?.1.contains("; generate --tensor-parallel divides"));
    assert!(!advice(&["--interactive"])?.1.contains("--tensor-parallel"));
    Ok(())
}
