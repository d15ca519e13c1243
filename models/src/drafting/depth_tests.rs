//! The depth policy against costs and chances that are known.

use super::*;

/// Steps of a model whose drafts take `cost(batch, depth)` and are right with a chance of `right` each. Returns tokens
/// a second, and the depth of each step.
fn run(steps: usize, batch: usize, right: f64, cost: impl Fn(usize) -> f64) -> (f64, Vec<usize>) {
    let (mut depths, mut seed, mut chosen) = (Depths::default(), 7u64, vec![]);
    let mut rows = vec![(depths.chances, usize::MAX); batch];
    let (mut tokens, mut seconds) = (0, 0.);
    for _ in 0..steps {
        let each = depths.choose(&rows);
        let depth = each.iter().copied().max().unwrap_or(0);
        for (row, &drafted) in rows.iter_mut().zip(&each) {
            let mut hits = 0;
            while hits < drafted {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                if (seed >> 33) as f64 / (1u64 << 31) as f64 > right {
                    break;
                }
                hits += 1;
            }
            row.0.learn(drafted, hits, 32);
            depths.chances.learn(drafted, hits, 256);
            tokens += hits + 1;
        }
        seconds += cost(depth);
        depths.measured(batch, depth, Duration::from_secs_f64(cost(depth)));
        chosen.push(depth);
    }
    (tokens as f64 / seconds, chosen)
}

#[test]
fn drafts_that_cost_more_than_they_bring_are_given_up() {
    for (batch, right, each) in [(1, 0.36, 0.7), (1, 0., 0.3), (8, 0.5, 1.), (1, 0.9, 2.)] {
        let (speed, _) = run(2000, batch, right, |depth| 1. + each * depth as f64);
        assert!(speed > 0.98 * batch as f64, "{batch} {right} {each}: {speed}");
    }
}

#[test]
fn good_drafts_go_as_deep_as_they_pay() {
    // The best depth of each, found by hand: tokens a second of every depth.
    for (right, each) in [(0.9, 0.05), (0.9, 0.2), (0.7, 0.1), (0.36, 0.15)] {
        let speed = |depth: usize| {
            let tokens: f64 = (0..=depth).map(|d| f64::powi(right, d as i32)).sum();
            tokens / (1. + each * depth as f64)
        };
        let best = (0..=MOST).map(speed).fold(0., f64::max);
        for batch in [1, 4] {
            let (got, _) = run(4000, batch, right, |depth| 1. + each * depth as f64);
            let got = got / batch as f64;
            assert!(got > 0.96 * best, "{right} {each}, {batch}: {got} of {best}");
        }
    }
}

/// Looks grow rare, and what they find is found still.
#[test]
fn drafts_that_never_pay_are_hardly_tried() {
    let cost = |depth: usize| 1. + 0.4 * depth as f64;
    let (_, chosen) = run(20_000, 1, 0.1, cost);
    let looks = chosen.iter().filter(|depth| **depth > 0).count();
    assert!(looks <= 2 * (20_000 / 1024 + 5), "{looks}");
    let mut depths = Depths::default();
    let mut step = |right: bool| {
        let depth = depths.choose(&[(depths.chances, usize::MAX)])[0];
        depths.measured(1, depth, Duration::from_secs_f64(cost(depth)));
        depths.chances.learn(depth, if right { depth } else { 0 }, 256);
        depth
    };
    (0..5000).for_each(|_| {
        step(false);
    });
    let first = (0..20_000).position(|_| step(true) > 1);
    assert!(first.is_some_and(|first| first < 10_000), "{first:?}");
}

/// Trials are due sooner where drafts pay than where they do not. After a change of text the steps so far can exceed those of a trial.
#[test]
fn a_trial_ends_after_a_change_of_text() {
    let mut depths = Depths::default();
    for depth in 0..=MOST {
        (0..5).for_each(|_| depths.measured(1, depth, Duration::from_secs_f64(1. + 0.4 * depth as f64)));
    }
    let text = |chance: f64| [(Chances { by_depth: [chance; MOST], seen: [9; MOST] }, usize::MAX)];
    (0..100).for_each(|step| assert_eq!(depths.choose(&text(0.)), [0], "{step}"));
    let best = 4;
    let chosen: Vec<usize> = (0..200).map(|_| depths.choose(&text(0.9))[0]).collect();
    let trials = chosen.iter().filter(|depth| **depth == best + 1).count();
    let rest = chosen.iter().filter(|depth| **depth == best).count();
    assert!((1..=7).contains(&trials) && rest > 180, "{chosen:?}");
    // Nor is one left open where no drafts pay again.
    assert_eq!(depths.choose(&text(0.)), [0]);
}

#[test]
fn nothing_is_drafted_before_its_time() {
    let (mut depths, ms) = (Depths::after(Duration::from_millis(100)), Duration::from_millis(1));
    for step in 0..100 {
        assert!(!depths.pays(1) && !depths.pays(2), "{step}");
        assert_eq!(depths.choose(&[(Chances::default(), 9)]), [0], "{step}");
        depths.measured(1, 0, ms);
    }
    assert!(depths.pays(1));
    assert_eq!(depths.choose(&[(Chances::default(), 9)]), [1]);
}

#[test]
fn what_never_pays_is_known() {
    let (mut depths, ms) = (Depths::default(), Duration::from_millis(1));
    assert!(depths.pays(1), "nothing is known");
    for depth in 0..2 {
        (0..3).for_each(|_| depths.measured(1, depth, ms * (1 + 2 * depth as u32)));
    }
    assert!(!depths.pays(1) && depths.pays(2));
    (0..30).for_each(|_| depths.measured(1, 1, ms));
    assert!(depths.pays(1));
}

#[test]
fn no_room_no_drafts() {
    let mut depths = Depths::default();
    (0..9).for_each(|_| depths.measured(2, 0, Duration::from_millis(1)));
    let good = Chances { by_depth: [0.9; MOST], seen: [9; MOST] };
    assert_eq!(depths.choose(&[(good, 0), (good, 0)]), [0, 0]);
    assert_eq!(depths.choose(&[(good, 0), (good, 1)]), [0, 1]);
}
