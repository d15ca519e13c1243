//! What the kernels of the chunk forms and of the step stamp, on a GPU; what all kernels have in common: profile.

use crate::profile::{count, gpus, shares_are_whole, Case, LIMITS};
use crate::semantics::tensor_cores;
use crate::step_args::StepArgs;
use crate::support::{has, values};
use candle_core::{DType, Device, Tensor};
use candle_gdn::profile::{record, Launch, Warp};
use candle_gdn::Algo;
use std::collections::{BTreeMap, BTreeSet};

/// Sequences whose heads are more than the multiprocessors of any card.
pub const MANY: usize = 90;

/// A call of a chunk form. HV 4: alone, in one segment and in several; and more heads than any card has multiprocessors,
/// so that a block goes through several.
pub struct Chunked {
    algo: Algo,
    tokens: usize,
    segments: usize,
    pub case: Case,
}

pub fn cases(device: &Device) -> Vec<Chunked> {
    let shapes = [(1, 200, 1), (1, 2048, 2), (1, 2048, 4), (MANY, 130, 0)];
    let all = tensor_cores(device).flat_map(|algo| shapes.map(|shape| (algo, shape)));
    all.map(|(algo, (batch, tokens, segments))| {
        let mut case = Case::new(batch, tokens, algo, device);
        case.options.segments = segments;
        Chunked { algo, tokens, segments, case }
    })
    .collect()
}

impl Chunked {
    fn launches(&self) -> Vec<Launch> {
        self.case.recorded(LIMITS).unwrap().launches
    }
}

fn roles(launch: &Launch) -> BTreeSet<&'static str> {
    launch.warps.iter().map(|w| w.role).collect()
}

#[test]
fn launches_of_a_chunk_form_have_their_roles() {
    let scan90 =
        ["prefill gates", "prefill loader", "prefill maker", "prefill math", "prefill norms"].map(|role| vec![role]);
    for device in gpus() {
        for chunked in cases(&device) {
            let launches = chunked.launches();
            let sm90 = chunked.algo == Algo::ChunkedSm90;
            let scan = if sm90 { scan90.concat() } else { vec!["prefill scan"] };
            let mut expected = if sm90 { vec![] } else { vec![vec!["prefill prepare"]] };
            match chunked.segments {
                2 => expected.extend([scan.clone(), scan]),
                4 => expected.extend([scan.clone(), vec!["prefill combine"], scan]),
                _ => expected.push(scan),
            }
            let got: Vec<Vec<_>> = launches.iter().map(|l| roles(l).into_iter().collect()).collect();
            assert_eq!(got, expected, "{}", chunked.case.what());
        }
    }
}

#[test]
fn a_lean_warp_has_a_scope_for_all_of_its_life() {
    for device in gpus() {
        for chunked in cases(&device) {
            for launch in chunked.launches() {
                for warp in &launch.warps {
                    let which = || format!("{}: {warp:?}", chunked.case.what());
                    assert_eq!(
                        (warp.dropped, warp.events[0].scope, warp.events[0].begin),
                        (0, "empty", 0),
                        "{}",
                        which()
                    );
                    assert!(warp.ns[0] <= warp.ns[1], "{}", which());
                    assert!(warp.events.windows(2).all(|e| e[0].end() == e[1].begin), "{}", which());
                    assert!(warp.events.iter().all(|e| e.end() <= warp.lifetime()), "{}", which());
                }
                shares_are_whole(&launch);
            }
        }
    }
}

/// The chunks that the warps of a block went through, which all of its roles agree about.
fn chunks_of(block: &[&Warp], what: &str) -> usize {
    let of_role = |role: &str, scope: &str| -> Vec<usize> {
        block.iter().filter(|w| w.role == role).map(|w| count(w, scope)).collect()
    };
    let chunks = of_role("prefill loader", "copy q/k")[0];
    assert_eq!(of_role("prefill gates", "gates"), [chunks], "{what}");
    assert_eq!(of_role("prefill norms", "normalise"), [chunks; 2], "{what}");
    let math = of_role("prefill math", "wait: matrices");
    assert!([4, 8].contains(&math.len()) && math.iter().all(|&n| n == chunks), "{what}: {math:?}");
    // Each chunk by the four warps of one maker.
    for scope in ["wait: tiles", "L", "inverse"] {
        let makers = of_role("prefill maker", scope);
        assert_eq!((makers.len(), makers.iter().sum()), (8, 4 * chunks), "{what}: {makers:?}");
    }
    chunks
}

#[test]
fn roles_of_a_block_have_the_same_chunks() {
    for device in gpus() {
        for chunked in cases(&device).iter().filter(|c| c.algo == Algo::ChunkedSm90) {
            let launches = chunked.launches();
            for launch in launches.iter().filter(|l| roles(l).len() > 1) {
                let mut blocks = BTreeMap::<u32, Vec<&Warp>>::new();
                for warp in &launch.warps {
                    blocks.entry(warp.block).or_default().push(warp);
                }
                for block in blocks.values() {
                    assert!(block.iter().all(|w| w.sm == block[0].sm), "a block on two multiprocessors");
                    let chunks = chunks_of(block, &chunked.case.what());
                    if chunked.segments == 1 {
                        assert_eq!(chunks, chunked.tokens.div_ceil(64), "{}", chunked.case.what());
                        let math = block.iter().find(|w| w.role == "prefill math").unwrap();
                        let waits = math.events.iter().filter(|e| e.scope == "wait: matrices").map(|e| e.token);
                        assert!(waits.eq((0..chunked.tokens as u32).step_by(64)), "{math:?}");
                        assert_eq!((count(math, "load state"), count(math, "store state")), (1, 1), "{math:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn scopes_of_the_sm_80_kernels() {
    for device in gpus() {
        for chunked in cases(&device).iter().filter(|c| c.algo == Algo::ChunkedSm80 && c.segments == 1) {
            let launches = chunked.launches();
            let chunks = chunked.tokens.div_ceil(64);
            for warp in &launches[1].warps {
                for scope in ["wait: tiles", "S K^T", "U", "update", "O", "o to its tile"] {
                    assert_eq!(count(warp, scope), chunks, "{scope}: {warp:?}");
                }
                assert_eq!((count(warp, "wait: state"), count(warp, "store state")), (1, 1), "{warp:?}");
            }
            // HV / HK heads of a key head, by two warpgroups.
            for warp in &launches[0].warps {
                for scope in ["products", "L", "inverse", "attention", "store record"] {
                    assert_eq!(count(warp, scope), 1, "{scope}: {warp:?}");
                }
            }
        }
    }
}

#[test]
fn every_kernel_of_the_step_is_stamped() {
    for device in gpus() {
        let sm90 = has(&device, Algo::ChunkedSm90);
        for algo in [Algo::StepWhole, Algo::StepSplit, Algo::StepHeads] {
            if algo != Algo::StepWhole && !sm90 {
                continue;
            }
            let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device).unwrap();
            let step = StepArgs::new(&[3], 3, [128, 128], randn).with(|step| step.options.rule.algo = algo);
            let step = step.in_dtype(DType::BF16);
            let [plain, recorded] = [(); 2].map(|()| step.copied());
            let out = plain.forward(|op| op).unwrap();
            let (out_recorded, profile) = record(&device, LIMITS, || recorded.forward(|op| op)).unwrap();
            assert_eq!((values(&out), plain.states()), (values(&out_recorded), recorded.states()), "{algo:?}");
            let [launch] = &profile.launches[..] else { panic!("{algo:?}: {} launches", profile.launches.len()) };
            assert!(roles(launch).into_iter().eq(["step"]), "{algo:?}: {:?}", roles(launch));
            for warp in &launch.warps {
                assert!(warp.dropped == 0 && count(warp, "update") > 0, "{algo:?}: {warp:?}");
                assert_eq!((count(warp, "wait: kernel before"), count(warp, "output")), (1, 1), "{algo:?}: {warp:?}");
            }
            for scope in ["convolve", "wait: q/k/v", "wait: gates", "gates", "wait: state", "store state"] {
                assert!(launch.warps.iter().any(|w| count(w, scope) > 0), "{scope}: {algo:?}");
            }
        }
    }
}
