//! With the `cuda` feature: compiles `cuda/` with nvcc into one static library, against candle-gdn's headers and with the
//! flags and architectures that it was compiled with (`CANDLE_GDN_CUDA_ARCHS`).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::build();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::path::{Path, PathBuf};

    pub fn build() {
        let of_core = |key: &str| {
            let name = format!("DEP_CANDLE_GDN_CUDA_{key}");
            std::env::var(&name).unwrap_or_else(|_| panic!("{name}: candle-gdn's build script sets it"))
        };
        let (include, flags) = (of_core("INCLUDE"), of_core("FLAGS"));
        let capability = of_core("CAPABILITY").parse::<usize>().expect("a compute capability");

        let (mut kernels, mut headers) = (vec![], vec![]);
        collect(Path::new("cuda"), &mut kernels, &mut headers);
        collect(Path::new(&include), &mut vec![], &mut headers);
        let watched = kernels.iter().chain(&headers).cloned().collect::<Vec<_>>();
        // The library is rebuilt when a file is newer than it; other flags are another library.
        let name: String = flags.chars().filter(char::is_ascii_alphanumeric).collect();
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(name);
        std::fs::create_dir_all(&out).expect("OUT_DIR is writable");

        // bindgen_cuda asks nvidia-smi and panics where there is none, unless this is set.
        if std::env::var_os("CUDA_COMPUTE_CAP").is_none() {
            std::env::set_var("CUDA_COMPUTE_CAP", capability.to_string());
        }
        let mut builder = bindgen_cuda::Builder::default()
            .kernel_paths(kernels)
            .watch(watched)
            .out_dir(out.clone())
            .compute_cap(capability);
        for flag in flags.split(' ').map(String::from).chain([format!("-I{include}")]) {
            builder = builder.arg(Box::leak(flag.into_boxed_str()));
        }
        builder.build_lib(out.join("libcandle_gdn_models_cuda.a"));
        println!("cargo:rustc-link-search=native={}", out.display());
        println!("cargo:rustc-link-lib=static=candle_gdn_models_cuda");
    }

    /// The kernels and the headers below a folder.
    fn collect(dir: &Path, kernels: &mut Vec<PathBuf>, headers: &mut Vec<PathBuf>) {
        let mut entries: Vec<_> = std::fs::read_dir(dir)
            .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
            .map(|entry| entry.expect("a readable folder").path())
            .collect();
        entries.sort();
        for path in entries {
            match path.extension().and_then(|e| e.to_str()) {
                _ if path.is_dir() => collect(&path, kernels, headers),
                Some("cu") => kernels.push(path),
                Some("cuh" | "h") => headers.push(path),
                _ => {}
            }
        }
    }
}
