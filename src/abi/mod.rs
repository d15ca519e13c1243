//! The C ABI of the CUDA kernels in Rust, one file a header. It is plain data, compiled on every machine, so that the
//! tests compare it with the headers wherever there is a C compiler.
#![allow(missing_docs)]

/// Declares the constants and the `#[repr(C)]` structs of a header, each field once, and a test that compares all of them
/// with the C compiler's (`crate::abi::c_layout`).
#[allow(clippy::crate_in_macro_def)] // each crate includes the comparison at this path, for its tests alone
#[doc(hidden)]
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
pub(crate) use candle_gdn_testing::c_layout;
pub mod gdn;
