//! Tensors of keys and values, and the division of a pass.

use super::*;

#[test]
fn pieces_hold_no_more_than_there_is_room_for() {
    let part = |slot, position, tokens| Part { slot, position, tokens };
    let rows = [(4, 10), (1, 0), (2, 7), (0, 3)];
    assert_eq!(
        parts(&rows, &[3, 20, 0, 5], 8),
        [vec![part(4, 10, 3), part(1, 0, 8)], vec![part(1, 8, 8)], vec![part(1, 16, 4), part(0, 3, 5)],]
    );
    let none = KvPiece::cut(&rows, &[8, 1, 0, 2], 8, &Device::Cpu).unwrap();
    assert!(none.is_empty());
    let pieces = KvPiece::cut(&rows, &[3, 20, 0, 5], 8, &Device::Cpu).unwrap();
    assert_eq!(pieces.iter().map(|piece| piece.tokens.clone()).collect::<Vec<_>>(), [0..11, 11..19, 19..28]);
    assert_eq!(pieces[2].cu_seqlens.as_slice(), [0, 4, 9]);
    assert_eq!(pieces[2].positions.to_vec1::<u32>().unwrap(), [16, 3]);
}

/// Copies of rings that wrapped and that did not, as on a device.
#[test]
fn a_ring_of_tensors_is_copied_by_tokens() -> Result<()> {
    const WINDOW: usize = 40;
    let capacity = capacity(Some(WINDOW), 1000);
    assert_eq!(capacity, 104);
    let ring = || -> Result<KvSlots> {
        let zeros = || Tensor::zeros((2, 3, capacity, 8), DType::F32, &Device::Cpu);
        Ok(KvSlots::Tensors([zeros()?, zeros()?], Some(WINDOW)))
    };
    // Token `t` has the value t, and -t in v.
    let rows = |tokens: Range<usize>, sign: f64| {
        let column = Tensor::arange(tokens.start as f32, tokens.end as f32, &Device::Cpu)?;
        (column.reshape((1, 1, tokens.len(), 1))?.broadcast_as((1, 3, tokens.len(), 8))? * sign)?.contiguous()
    };
    let values = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
    for end in [1, 39, 40, 41, 103, 104, 105, 150, 208, 230] {
        let (mut src, mut dst) = (ring()?, ring()?);
        for token in 0..end {
            src.write(1, token + 1, [&rows(token..token + 1, 1.0)?, &rows(token..token + 1, -1.0)?])?;
        }
        let (first, middle) = (end - end.min(WINDOW), end / 2);
        let [k, v] = src.read(1, 0..end)?;
        assert_eq!((values(&k)?, values(&v)?), (values(&rows(first..end, 1.0)?)?, values(&rows(first..end, -1.0)?)?));
        // In two segments, of which the first is older than the second.
        for (range, end) in [(0..middle, middle), (middle..end, end)].into_iter().filter(|(range, _)| !range.is_empty())
        {
            let start = range.start.max(end - end.min(WINDOW));
            dst.write(0, end, [&rows(start..end, 1.0)?, &rows(start..end, -1.0)?])?;
        }
        let [k, v] = dst.read(0, 0..end)?;
        assert_eq!((values(&k)?, values(&v)?), (values(&rows(first..end, 1.0)?)?, values(&rows(first..end, -1.0)?)?));
        // A longer sequence takes no more memory.
        let bytes = src.size_in_bytes();
        src.grow(5000)?;
        assert_eq!(src.size_in_bytes(), bytes);
    }
    Ok(())
}
