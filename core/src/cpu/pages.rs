//! Memory for weights, which products read from front to back, and for large results.

use pulp::bytemuck::Zeroable;
use std::alloc::{alloc_zeroed, handle_alloc_error, Layout};
use std::ops::{Deref, DerefMut};

/// A slice that never grows. A large one lies on huge pages where the system has some: with small ones a processor that
/// streams weights waits for the translation of addresses as well, most of all in a virtual machine.
pub struct Pages<T>(Memory<T>);

enum Memory<T> {
    Small(Vec<T>),
    #[cfg(target_os = "linux")]
    Huge(memmap2::MmapMut, usize),
}

impl<T: Zeroable + Copy> Pages<T> {
    /// `n` zeros.
    pub fn zeroed(n: usize) -> Self {
        #[cfg(target_os = "linux")]
        if let Some(map) = n.checked_mul(size_of::<T>()).and_then(map_huge) {
            return Self(Memory::Huge(map, n));
        }
        Self(Memory::Small(vec![T::zeroed(); n]))
    }
}

/// Bytes of a huge page.
const HUGE: usize = 2 << 20;

#[cfg(target_os = "linux")]
fn map_huge(bytes: usize) -> Option<memmap2::MmapMut> {
    if bytes < HUGE {
        return None;
    }
    // What is no whole huge page takes small ones, unless it is little.
    let whole = bytes.checked_next_multiple_of(HUGE)?;
    let map = memmap2::MmapMut::map_anon(if whole - bytes <= bytes / 8 { whole } else { bytes }).ok()?;
    map.advise(memmap2::Advice::HugePage).ok()?;
    Some(map)
}

impl<T> Deref for Pages<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match &self.0 {
            Memory::Small(data) => data,
            // SAFETY: the map is large enough for so many T, aligned to a page, and began as zeros, which T may be.
            #[cfg(target_os = "linux")]
            Memory::Huge(map, n) => unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), *n) },
        }
    }
}

impl<T> DerefMut for Pages<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Memory::Small(data) => data,
            // SAFETY: as above.
            #[cfg(target_os = "linux")]
            Memory::Huge(map, n) => unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), *n) },
        }
    }
}

/// `n` zeros in a vector, for a result that is too large to lie in a cache. Where the system has huge pages, its first use costs one page
/// fault for each of these, instead of five hundred.
pub fn zeroed_vec<T: Zeroable + Copy>(n: usize) -> Vec<T> {
    let Ok(layout) = Layout::array::<T>(n) else { return vec![T::zeroed(); n] };
    if layout.size() < HUGE {
        return vec![T::zeroed(); n];
    }
    // SAFETY: the layout has a size, the memory is that of n zeros, which T may be, and the vector's allocator is the same.
    unsafe {
        let data = alloc_zeroed(layout);
        if data.is_null() {
            handle_alloc_error(layout);
        }
        // A hint, for the whole pages inside: whether the system takes it does not matter.
        #[cfg(target_os = "linux")]
        libc::madvise(
            data.add(data.align_offset(HUGE)).cast(),
            (layout.size() - data.align_offset(HUGE)) / HUGE * HUGE,
            libc::MADV_HUGEPAGE,
        );
        Vec::from_raw_parts(data.cast(), n, n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_all_sizes() {
        for n in [0, 1, 1000, (2 << 20) / 4, (2 << 20) / 4 + 1, (5 << 20) / 4, (31 << 20) / 4 + 3] {
            assert!(zeroed_vec::<f32>(n) == vec![0.; n]);
            let mut pages = Pages::<f32>::zeroed(n);
            assert!(pages.len() == n && pages.iter().all(|x| *x == 0.));
            pages.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32);
            assert!(pages.iter().enumerate().all(|(i, x)| *x == i as f32));
        }
    }
}
