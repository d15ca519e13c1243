//! Slots that are handed out and taken back.

use super::*;

fn refused<T>(result: Result<T>, part: &str) {
    let error = result.map(drop).unwrap_err().to_string();
    assert!(error.contains(part), "{error}");
}

#[test]
fn the_allocator_keeps_count() {
    let mut allocator = SlotAllocator::new(3).unwrap();
    assert_eq!((allocator.len(), allocator.available(), allocator.capacity()), (0, 3, 3));
    let slots: Vec<u32> = (0..3).map(|_| allocator.allocate_unset().unwrap()).collect();
    assert_eq!(slots, [0, 1, 2]);
    refused(allocator.allocate_unset(), "SlotAllocator: allocate: expected a free slot, all 3 are in use");
    allocator.free(1).unwrap();
    refused(allocator.free(1), "SlotAllocator: free: expected a slot in use, got 1, which is free");
    refused(allocator.free(3), "SlotAllocator: free: expected a slot below 3, got 3");
    refused(allocator.free(u32::MAX), "SlotAllocator: free: expected a slot below 3");
    assert_eq!(allocator.allocate_unset().unwrap(), 1);
    (0..3).for_each(|slot| allocator.free(slot).unwrap());
    assert_eq!(allocator.len(), 0);
    refused(SlotAllocator::new(1 << 31), "SlotAllocator: capacity: expected at most 2147483647");
}
