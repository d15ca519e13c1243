//! The storages of several tensors, each locked once.

use crate::check::storage_key;
use candle_core::{Storage, StorageRef, Tensor};
use std::array::from_fn;

/// Read locks of the storages of tensors. One that several of them share is locked once, by the first: a thread that reads it
/// and locks it again would wait for ever behind another thread that began to wait for writing it (`Var::set`) in between.
pub struct Locked<'a, const N: usize> {
    /// The first tensor that has the storage of each.
    first: [usize; N],
    guards: [Option<StorageRef<'a>>; N],
}

impl<'a, const N: usize> Locked<'a, N> {
    pub fn new(tensors: [&'a Tensor; N]) -> Self {
        let keys = tensors.map(storage_key);
        let first: [usize; N] = from_fn(|i| (0..i).find(|j| keys[*j] == keys[i]).unwrap_or(i));
        let guards = from_fn(|i| (first[i] == i).then(|| tensors[i].storage_and_layout().0));
        Self { first, guards }
    }

    /// In the order of the tensors.
    pub fn storages(&self) -> [&Storage; N] {
        self.first.map(|first| self.guards[first].as_deref().expect("the first one has the lock"))
    }
}

#[cfg(test)]
#[test]
fn a_shared_storage_is_locked_once() {
    use candle_core::{DType, Device};
    let [x, y] = [2, 3].map(|n| Tensor::zeros(n, DType::F32, &Device::Cpu).unwrap());
    let view = x.narrow(0, 1, 1).unwrap();
    let locked = Locked::new([&x, &y, &view, &x]);
    assert_eq!(locked.guards.each_ref().map(Option::is_some), [true, true, false, false]);
    let addresses = locked.storages().map(|storage| std::ptr::from_ref(storage).addr());
    assert!(addresses[0] == addresses[2] && addresses[0] == addresses[3] && addresses[0] != addresses[1]);
}
