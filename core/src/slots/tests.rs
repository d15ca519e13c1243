//! Slot maps: values that break the rules, and new values in the same memory.

use super::*;

fn host(read: &[u32], write: Option<&[u32]>) -> Result<Host> {
    Host::new("op: slots", read, write)
}

#[test]
fn values_are_checked() {
    let error = |read: &[u32], write: Option<&[u32]>| host(read, write).unwrap_err().to_string();
    assert!(host(&[2, NO_SLOT, 0, NO_SLOT], None).unwrap().check_range("op", 3).is_ok());
    let past = host(&[0, 3], None).unwrap().check_range("op", 3).unwrap_err().to_string();
    assert!(past.contains("op: slots: expected values below 3 (the state's slots), got 3 at 1"), "{past}");
    assert!(error(&[1, 1], None).contains("op: slots: expected distinct values, got 1 a second time at 1"));
    // A fork: one slot read by three, of which none writes it.
    assert!(host(&[1, 1, 1], Some(&[0, 2, 3])).is_ok());
    assert!(error(&[1, 1], Some(&[0, 0])).contains("got 0 a second time at 1"));
    assert!(error(&[1, 1], Some(&[1, 0])).contains("got 1, read at 1 and written at 0"));
    assert!(error(&[1, 2], Some(&[2, 3])).contains("got 2, read at 1 and written at 0"));
    assert!(error(&[1], Some(&[2, 3])).contains("as many slots to write as to read (1), got 2"));
    // Each its own, next to each other and in place; padding by either map takes part in nothing.
    assert!(host(&[1, 3], Some(&[2, 3])).is_ok());
    let padded = host(&[1, NO_SLOT, 9], Some(&[0, 0, NO_SLOT])).unwrap();
    assert!(padded.check_range("op", 2).is_ok());
    assert!(host(&[], None).unwrap().check_range("op", 0).is_ok());
}

#[test]
fn set_keeps_the_memory_and_the_old_values_on_error() {
    let mut slots = Slots::from_to(&[0, 1], &[2, 3], &Device::Cpu).unwrap();
    let memory = slots.read().clone();
    slots.set(&[4, 4], &[5, NO_SLOT]).unwrap();
    assert_eq!(memory.to_vec1::<u32>().unwrap(), [4, 4]);
    assert_eq!(slots.on_host(), Some((&[4, 4][..], &[5, NO_SLOT][..])));
    for (read, write) in [(&[1, 1][..], &[2, 2][..]), (&[1][..], &[2][..]), (&[1, 1][..], &[2][..])] {
        assert!(slots.set(read, write).is_err());
        assert_eq!(memory.to_vec1::<u32>().unwrap(), [4, 4]);
    }
    // Maps that it does not write: of another dtype, and strided.
    let wide = Tensor::new(&[2i64, 3], &Device::Cpu).unwrap();
    let strided = Tensor::new(&[[2u32, 0], [3, 0]], &Device::Cpu).unwrap().get_on_dim(1, 0).unwrap();
    for write in [wide, strided] {
        assert!(Slots::from_tensors(&memory, &write).set(&[6, 7], &[8, 9]).is_err());
        assert_eq!(memory.to_vec1::<u32>().unwrap(), [4, 4]);
    }
    let mut same = Slots::new(&[0, 1], &Device::Cpu).unwrap();
    assert!(same.set(&[0, 1], &[1, 0]).unwrap_err().to_string().contains("slots: set"));
    same.set(&[7, 8], &[7, 8]).unwrap();
    assert_eq!(same.write().to_vec1::<u32>().unwrap(), [7, 8]);
}

#[test]
fn i64_maps_have_minus_one() {
    let read = |values: &[i64]| cpu_values("op", &Tensor::new(values, &Device::Cpu).unwrap());
    assert_eq!(read(&[3, -1, 0]).unwrap(), [3, NO_SLOT, 0]);
    for bad in [-2, i64::from(u32::MAX), 1 << 32] {
        assert!(read(&[bad]).unwrap_err().to_string().contains("op: slots: expected -1 or a slot"), "{bad}");
    }
}

#[test]
fn padding_stays_padding_in_what_is_written() {
    let written = |slots: &Slots| {
        let slots = slots.written(9).unwrap();
        (slots.read().to_vec1::<u32>().unwrap(), slots.write().to_vec1::<u32>().unwrap())
    };
    let (read, write) = ([0, NO_SLOT, 1, NO_SLOT], [5, 6, NO_SLOT, 5]);
    let host = Slots::from_to(&read, &write, &Device::Cpu).unwrap();
    let want = vec![5, NO_SLOT, NO_SLOT, NO_SLOT];
    assert_eq!(written(&host), (want.clone(), want.clone()));
    assert_eq!(host.written(9).unwrap().on_host().unwrap().0, want);
    let tensor = |values: &[u32]| Tensor::new(values, &Device::Cpu).unwrap();
    assert_eq!(written(&Slots::from_tensors(&tensor(&read), &tensor(&write))), (want.clone(), want));
    // A slot out of range, 9 of 9, stays one.
    assert_eq!(written(&Slots::from_tensors(&tensor(&[9, 8]), &tensor(&[2, 3]))).0, [9, 3]);
}
