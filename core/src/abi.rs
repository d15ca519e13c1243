//! What every header of the C ABI shares: constants, structs, the text of a status. It is plain data, compiled on every
//! machine, so that the tests compare it with `cuda/gdn.h` wherever there is a C compiler.

use std::ffi::c_void;

/// Declares the constants and the `#[repr(C)]` structs of a header, each field once, and a test that compares all of them
/// with the C compiler's (`crate::abi::c_layout`).
#[allow(clippy::crate_in_macro_def)] // each crate includes the comparison at this path, for its tests alone
#[macro_export]
macro_rules! c_header {
    (
        $header:literal;
        constants { $($const_vis:vis $constant:ident: $const_type:ty = $value:expr;)* }
        structs {
            $(
                $(#[$attribute:meta])*
                $struct_vis:vis struct $name:ident = $c_name:ident { $($field_vis:vis $field:ident: $type:ty,)* }
            )*
        }
    ) => {
        $(
            #[doc = concat!("`", stringify!($constant), "`")]
            #[allow(dead_code)]
            $const_vis const $constant: $const_type = $value;
        )*
        $(
            #[doc = concat!("`", stringify!($c_name), "`")]
            #[repr(C)]
            #[allow(dead_code)]
            $(#[$attribute])*
            $struct_vis struct $name { $($field_vis $field: $type,)* }
        )*

        #[cfg(test)]
        #[test]
        #[allow(clippy::vec_init_then_push)] // a header has any number of constants, none among them
        fn is_what_the_header_says() {
            use std::mem::{offset_of, size_of};
            let mut lines = vec![];
            $(lines.push((stringify!($constant).to_owned(), vec![$constant as i64]));)*
            $(
                lines.push((concat!("struct ", stringify!($c_name)).to_owned(), vec![size_of::<$name>() as i64]));
                $(
                    let place = vec![offset_of!($name, $field) as i64, size_of::<$type>() as i64];
                    lines.push((concat!(stringify!($c_name), ".", stringify!($field)).to_owned(), place));
                )*
            )*
            crate::abi::c_layout::compare($header, &lines);
        }
    };
}

#[cfg(test)]
#[path = "../../tests/support/c_layout.rs"]
mod c_layout;

c_header! {
    "gdn.h";
    constants {
        pub GDN_F32: i32 = 0;
        pub GDN_BF16: i32 = 1;
        pub GDN_F16: i32 = 2;
        pub GDN_OK: i32 = 0;
        pub GDN_BAD_ALGO: i32 = 7;
        pub GDN_CUDA_ERROR: i32 = 1000;
        pub GDN_NO_SLOT: u32 = u32::MAX;
    }
    structs {
        #[derive(Clone, Copy)]
        pub struct Heads = gdn_heads {
            pub ptr: *const c_void,
            pub seq_stride: i64,
            pub token_stride: i64,
            pub head_stride: i64,
        }
        #[derive(Clone, Copy)]
        pub struct Sequences = gdn_sequences {
            pub cu_seqlens: *const u32,
            pub num_seqs: i32,
            pub tokens_per_seq: i32,
            pub max_tokens_per_seq: i32,
            pub total_tokens: i32,
        }
        #[derive(Clone, Copy)]
        pub struct Slots = gdn_slots {
            pub slots: *const u32,
            pub num_slots: i64,
            pub slot_stride: i64,
        }
    }
}

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
        11 => "the workspace is null, not aligned to 256 bytes or smaller than gdn_rule_workspace says",
        1002 => "CUDA error 2: out of memory",
        1209 => "CUDA error 209: no kernel image is available for execution on the device",
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
