use super::*;

fn output(tokens: &[u32], finished: Option<FinishReason>) -> Output {
    Output { tokens: tokens.to_vec(), logprobs: Vec::new(), state: None, finished }
}

/// The engine cancels what has ended by a token that it does not know: the answer is whole all the same.
#[test]
fn an_answer_counts_by_its_own_end() {
    let shared = Arc::new(Shared::new(64, 4));
    let answer = || {
        let ends = Ends { visible: [5].into(), hidden: [6].into(), min_tokens: 2 };
        let (sender, running) = mpsc::unbounded_channel();
        (Answer { sender, ends, shared: shared.clone(), sent: 0, is_whole: false }, running)
    };
    let cancelled = || output(&[3], Some(FinishReason::Cancelled));
    for (last, want) in [(&[1, 5, 2], &[1, 5][..]), (&[1, 6, 2], &[1][..])] {
        let (mut answer, mut running) = answer();
        assert!(answer.send(output(&[5, 6], None)), "too early");
        assert!(!answer.send(output(last, None)));
        assert!(!answer.send(cancelled()));
        drop(answer);
        assert_eq!(running.try_recv().unwrap().tokens, [5, 6]);
        let end = running.try_recv().unwrap();
        assert_eq!((&end.tokens[..], end.finished), (want, Some(FinishReason::Stop)));
        assert!(running.try_recv().is_err());
    }
    let (mut answer, running) = answer();
    drop(running);
    assert!(!answer.send(output(&[1], None)));
    answer.send(cancelled());
    let text = shared.exposition("m");
    for (reason, count) in [("stop", 2), ("cancelled", 1)] {
        let line = format!("candle_gdn_requests_total{{model=\"m\",reason=\"{reason}\"}} {count}");
        assert!(text.lines().any(|other| other == line), "{line} in\n{text}");
    }
}
