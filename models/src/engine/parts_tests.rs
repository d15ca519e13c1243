//! The parts that need no model.

use super::guess::{guess, DraftTally};
use super::prefixes::{PrefixTally, Prefixes};
use super::request::Event;

#[test]
fn guesses_follow_the_latest_match() {
    assert_eq!(guess(&[1, 2, 3, 9, 8, 5, 1, 2, 3], 2), [9, 8]);
    assert_eq!(guess(&[1, 2, 3, 9, 4, 2, 3, 7, 7, 2, 3], 1), [7], "two tokens, the later place");
    assert_eq!(guess(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7], "three tokens go before a later two");
    assert_eq!(guess(&[5, 6, 5], 4), [6, 5, 6, 5], "in a circle");
    assert_eq!(guess(&[5, 5], 3), [5, 5, 5]);
    assert!(guess(&[1, 2, 3], 3).is_empty(), "nothing like it before");
    assert!(guess(&[1, 1], 0).is_empty());
    assert_eq!((guess(&[], 3), guess(&[1], 3)), (vec![], vec![]));
    let tally = DraftTally { guessed: 60, right: 34, tokens: 57, steps: 30 };
    assert_eq!(tally.to_string(), "draft: 34 of 60 tokens accepted (57 %), 1.9 tokens a step");
    assert_eq!(DraftTally::default().to_string(), "draft: 0 of 0 tokens accepted (0 %), 0.0 tokens a step");
}

#[test]
fn prompts_wait_for_what_they_share() {
    let mut prefixes = Prefixes::new(2, 100, 0).unwrap();
    let (a, b) = ([1, 2, 3, 4, 5], [1, 2, 3, 4]);
    // Four tokens agree, but one of `b` must be fed.
    assert_eq!(prefixes.cuts(&a, 0, [&b[..], &a[..], &[7, 8]].into_iter()), [2, 4]);
    assert_eq!(prefixes.cuts(&a, 2, [&b[..]].into_iter()), [] as [usize; 0]);
    assert!(prefixes.coming(&b, [(&a[..], 1)].into_iter()));
    assert!(!prefixes.coming(&b, [(&a[..], 2)].into_iter()), "not kept");
    assert_eq!(prefixes.find(&a), None);
    let mut events = vec![];
    assert!(prefixes.keep(&a[..2], "two", 60, &mut events).unwrap());
    assert!(!prefixes.coming(&b, [(&a[..], 1)].into_iter()), "it is there");
    assert_eq!(prefixes.find(&b), Some((2, &"two")));
    assert!(!prefixes.keep(&a[..4], "four", 1 << 20, &mut events).unwrap(), "more than the budget");
    assert_eq!(prefixes.tally(), PrefixTally { reused: 2, asked: 9, hits: 1, misses: 1, bytes: 60 });
    let mut none = Prefixes::new(2, 0, 0).unwrap();
    assert_eq!((none.keep(&a[..2], 0, 1, &mut events).unwrap(), none.find(&a)), (true, None));
    assert!(!none.coming(&b, [(&a[..], 0)].into_iter()));
}

#[test]
fn the_last_prompts_stand_for_those_to_come() {
    let mut prefixes = Prefixes::<u8>::new(2, 100, 2).unwrap();
    let none = || [].into_iter();
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 5], 0, none()), [4], "its own end");
    assert_eq!(prefixes.cuts(&[1, 2, 7, 8, 9, 10], 0, none()), [2, 4], "where it leaves the first one");
    assert_eq!(prefixes.cuts(&[5, 6, 7], 0, none()), [2]);
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 6], 0, none()), [2, 4]);
    assert_eq!(prefixes.cuts(&[5, 6, 8, 9, 1], 0, none()), [2, 4]);
    let last = [1, 2, 7, 8, 1, 1, 1];
    assert_eq!(prefixes.cuts(&last, 0, none()), [2, 6], "not 4: the second one is forgotten");
    assert_eq!(prefixes.cuts(&last, 6, none()), [] as [usize; 0]);
    assert_eq!(prefixes.cuts(&[1, 2, 9, 9, 9], 0, none()), [2, 4]);
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 9], 0, none()), [2, 4]);
    assert_eq!(prefixes.cuts(&[1, 2, 3, 4, 5, 6, 7], 0, none()), [4, 6], "the most");
}

#[test]
fn what_is_kept_and_dropped_is_told() {
    let mut prefixes = Prefixes::new(2, 100, 0).unwrap();
    let mut told = |prefix: &[u32], bytes| {
        let mut events = vec![];
        prefixes.keep(prefix, (), bytes, &mut events).unwrap();
        let told = events.into_iter().map(|event| match event {
            Event::PrefixKept { tokens } => (true, tokens),
            Event::PrefixDropped { tokens } => (false, tokens),
            other => panic!("{other:?}"),
        });
        told.collect::<Vec<_>>()
    };
    assert_eq!(told(&[1, 2], 40), [(true, vec![1, 2])]);
    assert_eq!(told(&[1, 2, 3, 4], 40), [(true, vec![1, 2, 3, 4])]);
    assert_eq!(told(&[1, 2], 50), [], "in its own place");
    assert_eq!(told(&[5, 6], 40), [(false, vec![1, 2, 3, 4]), (true, vec![5, 6])]);
    assert_eq!(told(&[5, 6], 101), [(false, vec![5, 6])], "too large now");
}
