//! The text of a status of the C ABI.

use crate::abi::GDN_CUDA_ERROR;

/// What `gdn_status_string` says of the statuses of this ABI. A launch's own error comes as [`GDN_CUDA_ERROR`] and its number.
pub fn status_text(status: i32) -> String {
    let text = match status {
        0 => "success",
        1 => "a dtype is none of f32, bf16, f16",
        2 => "a required pointer is null",
        3 => "the number of key heads does not divide the number of value heads, or one is not positive",
        4 => "a head size is outside 1..256",
        5 => "a count is negative, or past what the grid or an index can hold",
        6 => "the convolution width is outside 2..8",
        7 => "the requested kernel does not support this shape, alignment or device",
        8 => "a stride is negative",
        9 => "built without GDN_PROFILE",
        10 => "the profile buffer is not aligned to 16 bytes, or has no room for the warps of this launch",
        11 => "the workspace is null, not aligned to 256 bytes or smaller than the launcher's _workspace function says",
        1002 => "CUDA error 2: out of memory",
        1209 => {
            "CUDA error 209: the kernels were not compiled for this GPU (CANDLE_GDN_CUDA_ARCHS lists what is compiled)"
        }
        1700 => "CUDA error 700: an illegal memory access was encountered",
        1719 => "CUDA error 719: unspecified launch failure",
        status if status > GDN_CUDA_ERROR => return format!("CUDA error {}", status - GDN_CUDA_ERROR),
        _ => "unknown status",
    };
    text.to_owned()
}

#[cfg(test)]
#[test]
fn statuses_have_the_text_of_the_kernels() {
    let header = include_str!("../../cuda/gdn.h").split("typedef enum gdn_status {").nth(1).expect("the statuses");
    let texts = include_str!("../../cuda/common/status.cu").replace('\n', " ");
    let mut seen = 0;
    for line in header.lines().map_while(|line| if line.contains("GDN_CUDA_ERROR") { None } else { Some(line.trim()) })
    {
        let Some((name, rest)) = line.split_once(" = ") else { continue };
        let status = rest.split([',', ' ']).next().and_then(|number| number.parse().ok()).expect("a number");
        let case = texts.split(&format!("case {name}:")).nth(1).unwrap_or_else(|| panic!("{name} has no text"));
        assert_eq!(case.split('"').nth(1), Some(&*status_text(status)), "{name}");
        seen += 1;
    }
    assert!(seen > 10, "{seen}");
}
