//! Heads and lengths: rows that go round, and the token with which a ring is flushed.

use super::*;
use candle_core::Device;

#[test]
fn rows_go_round() {
    let span = Span { head: 30, length: 4 };
    assert_eq!(Span::from_bits(span.to_bits()), span);
    assert_eq!((span.row(1), span.row(2), span.row_before(1), span.row_before(3)), (31, 0, 1, 31));
}

/// A ring is flushed by the call with whose tokens it would have more than 16 entries: not one token sooner or later.
#[test]
fn a_ring_is_flushed_with_the_seventeenth_entry() {
    let span = Span { head: 30, length: 4 };
    assert!(!span.flushes(12, false) && span.flushes(13, false) && span.flushes(0, true));
    assert!(!Span { head: 3, length: 0 }.flushes(16, false));
    let after = |tokens, kept, flush| span.after(tokens, kept, flush, false);
    assert_eq!(after(12, 5, false), Span { head: 30, length: 9 });
    assert_eq!(after(13, 5, false), Span { head: 2, length: 5 });
    assert_eq!(after(0, 0, true), Span { head: 2, length: 0 });
}

/// The same through the tensor, token by token, and by drafts.
#[test]
fn spans_advance() {
    let spans = RingSpans::new(2, &Device::Cpu).unwrap();
    let slots = Slots::new(&[1], &Device::Cpu).unwrap();
    let span = |spans: &RingSpans| Span::from_bits(spans.tensor().to_vec1::<u32>().unwrap()[1]);
    for token in 1..=40 {
        spans.advance(&slots, RingMove::append(None, 1)).unwrap();
        let flushes = (token - 1) / 16;
        assert_eq!(span(&spans), Span { head: flushes * 16 % 32, length: token - flushes * 16 }, "{token}");
    }
    // 8 entries and 8 drafts fit; 9 do not.
    for (drafts, head, length) in [(8, 0, 8), (9, 8, 0)] {
        let cu = CuSeqlens::from_lengths(&[drafts], &Device::Cpu).unwrap();
        spans.draft(&slots, &cu).unwrap();
        assert_eq!(span(&spans), Span { head, length });
    }
    let cu = CuSeqlens::from_lengths(&[9], &Device::Cpu).unwrap();
    spans.accept(&slots, &cu, &Tensor::new(&[3u32], &Device::Cpu).unwrap()).unwrap();
    assert_eq!(span(&spans), Span { head: 8, length: 3 });
}
