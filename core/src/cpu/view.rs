//! How the kernels see their arguments: strided heads, sequences, slots, output shared between tasks.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A tensor `[sequence, token, head, dim]` whose last dimension is contiguous; strides count elements.
/// Packed tensors have a sequence stride of zero.
#[derive(Clone, Copy)]
pub struct Heads<'a, T> {
    pub data: &'a [T],
    pub seq_stride: usize,
    pub token_stride: usize,
    pub head_stride: usize,
}

impl<'a, T> Heads<'a, T> {
    #[inline(always)]
    pub fn row(&self, seq: usize, token: usize, head: usize, len: usize) -> &'a [T] {
        let start = seq * self.seq_stride + token * self.token_stride + head * self.head_stride;
        &self.data[start..start + len]
    }
}

/// Prefetches the cache lines of `row`, where the compiler knows an instruction for it.
#[inline(always)]
pub fn prefetch<T>(row: &[T]) {
    row.chunks((64 / size_of::<T>()).max(1)).for_each(|line| prefetch_line(line.as_ptr()));
}

/// Prefetches the cache line at an address, whatever is there.
#[inline(always)]
pub fn prefetch_line<T>(line: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        // SAFETY: a hint, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// How tokens are grouped into sequences.
#[derive(Clone, Copy)]
pub struct Sequences<'a> {
    /// Packed tokens: sequence `n` owns `cu_seqlens[n]..cu_seqlens[n + 1]`.
    pub cu_seqlens: Option<&'a [u32]>,
    pub count: usize,
    /// Tokens of each sequence where they are not packed.
    pub tokens: usize,
}

impl Sequences<'_> {
    /// First token (in the packed order, or zero) and length of sequence `n`.
    #[inline(always)]
    pub fn range(&self, n: usize) -> (usize, usize) {
        match self.cu_seqlens {
            Some(cu) => (cu[n] as usize, (cu[n + 1] - cu[n]) as usize),
            None => (0, self.tokens),
        }
    }

    /// Index of the first token of sequence `n` in a contiguous output.
    #[inline(always)]
    pub fn out_token(&self, n: usize) -> usize {
        match self.cu_seqlens {
            Some(cu) => cu[n] as usize,
            None => n * self.tokens,
        }
    }

    pub fn total_tokens(&self) -> usize {
        self.out_token(self.count)
    }
}

/// Which slots of the state the sequences read and write.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    /// `None` is the identity, in both.
    pub read: Option<&'a [u32]>,
    pub write: Option<&'a [u32]>,
    /// Elements from one slot to the next.
    pub stride: usize,
}

impl Slots<'_> {
    /// The slots that sequence `n` reads and writes, or `None` where it is padding.
    #[inline(always)]
    pub fn numbers(&self, n: usize) -> Option<(usize, usize)> {
        let slot = |map: Option<&[u32]>| match map {
            Some(map) if map[n] == u32::MAX => None,
            Some(map) => Some(map[n] as usize),
            None => Some(n),
        };
        slot(self.read).zip(slot(self.write))
    }

    /// Where sequence `n` finds its state and where it leaves it, or `None` where it is padding.
    #[inline(always)]
    pub fn offsets(&self, n: usize) -> Option<(usize, usize)> {
        let (read, write) = self.numbers(n)?;
        Some((read * self.stride, write * self.stride))
    }
}

/// A mutable slice that tasks of one parallel loop write disjoint parts of.
pub struct Shared<'a, T> {
    ptr: *mut T,
    len: usize,
    _life: std::marker::PhantomData<&'a mut [T]>,
}

unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(data: &'a mut [T]) -> Self {
        Self { ptr: data.as_mut_ptr(), len: data.len(), _life: std::marker::PhantomData }
    }

    /// # Safety
    /// No two live parts may overlap.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "part out of range");
        std::slice::from_raw_parts_mut(self.ptr.add(start), len)
    }

    /// The part at `dst` with a copy of the `len` elements at `src`, where they are not the same.
    ///
    /// # Safety
    /// No live part may overlap that at `dst`, nor be written where it overlaps that at `src`.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub unsafe fn part_from(&self, src: usize, dst: usize, len: usize) -> &mut [T]
    where
        T: Copy,
    {
        let part = self.part(dst, len);
        if src != dst {
            assert!(src <= self.len && len <= self.len - src, "part out of range");
            assert!(src.abs_diff(dst) >= len, "parts overlap");
            std::ptr::copy_nonoverlapping(self.ptr.add(src), part.as_mut_ptr(), len);
        }
        part
    }
}

/// Runs `task(0..tasks)` on candle's thread pool, or on this thread when the whole work (in elementary steps) is too
/// small to wake other threads for: about 10 us of one core. The pool waits by spinning, so on a busy machine a short loop that
/// goes through it costs far more than it saves.
///
/// Each thread begins with the same part of the tasks every time, so that a state of which a call leaves a part in a
/// core's cache is found there by the next; a thread that has finished its own part helps the others.
pub fn parallel(tasks: usize, work_per_task: usize, task: impl Fn(usize) + Sync) {
    const INLINE_WORK: usize = 1 << 16;
    if tasks <= 1 || tasks.saturating_mul(work_per_task) <= INLINE_WORK {
        return (0..tasks).for_each(task);
    }
    let pool = candle_core::utils::barrier_pool();
    let parts = tasks.min(pool.n_workers() + 1);
    let first = |part: usize| part * tasks / parts;
    let next: Vec<Line> = (0..parts).map(|part| Line(AtomicUsize::new(first(part)))).collect();
    let at_once = (tasks / (8 * parts)).max(1);
    // One item a thread; which one it gets does not matter.
    pool.execute_chunked(parts, |_| {
        let seat = SEAT.with(|seat| *seat);
        for part in (0..parts).map(|i| (seat + i) % parts) {
            let end = first(part + 1);
            loop {
                let start = next[part].0.fetch_add(at_once, Ordering::Relaxed);
                if start >= end {
                    break;
                }
                (start..end.min(start + at_once)).for_each(&task);
            }
        }
    });
}

/// A counter with a cache line of its own.
#[repr(align(64))]
struct Line(AtomicUsize);

thread_local! {
    /// Numbers the threads in the order in which they first came here.
    static SEAT: usize = {
        static TAKEN: AtomicUsize = AtomicUsize::new(0);
        TAKEN.fetch_add(1, Ordering::Relaxed)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for tasks in [0, 1, 2, 3, 7, 31, 32, 33, 1000] {
            let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            parallel(tasks, 1 << 20, |task| {
                runs[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{tasks}: {runs:?}");
        }
    }
}
