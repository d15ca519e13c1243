//! With the `cuda` feature: compiles `cuda/` with nvcc into one static library for every architecture it is to run on, and
//! tells the packages that depend on this one where its headers are and how it was compiled.
//!
//! `CANDLE_GDN_CUDA_ARCHS` (default `80,90a`) lists compute capabilities; what is not listed and newer than the lowest
//! runs through that one's PTX. `100` and `120` may be listed where nvcc knows them. The `profile` feature builds the
//! kernels with their clock stamps.
//!
//! `CANDLE_GDN_CUDA_SHARED_LIMIT` caps the bytes of shared memory that a block uses: with 101376 and the architecture 80 a large
//! card stands in for an RTX 30, 40 or 50, an A10, an L4 or an L40S.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::build();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::path::{Path, PathBuf};

    const ARCHS: &str = "CANDLE_GDN_CUDA_ARCHS";
    const SHARED_LIMIT: &str = "CANDLE_GDN_CUDA_SHARED_LIMIT";

    pub fn build() {
        println!("cargo:rerun-if-env-changed={ARCHS}");
        println!("cargo:rerun-if-env-changed={SHARED_LIMIT}");
        let archs = std::env::var(ARCHS).unwrap_or_else(|_| "80,90a".into());
        let mut archs: Vec<String> = archs.split(',').map(|arch| arch.trim().to_owned()).collect();
        archs.sort_by_key(|arch| number(arch));
        let lowest = number(&archs[0]);

        let (mut kernels, mut all) = (vec![], vec![]);
        collect(Path::new("cuda"), &mut kernels, &mut all);
        // The library is rebuilt when a file is newer than it; other architectures or flags are another library.
        let profile = cfg!(feature = "profile");
        let limit = std::env::var(SHARED_LIMIT).ok();
        let name = archs.join("-") + if profile { "-profile" } else { "" } + limit.as_deref().unwrap_or("");
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(name);
        std::fs::create_dir_all(&out).expect("OUT_DIR is writable");

        // bindgen_cuda asks nvidia-smi and panics where there is none, unless this is set.
        if std::env::var_os("CUDA_COMPUTE_CAP").is_none() {
            std::env::set_var("CUDA_COMPUTE_CAP", lowest.to_string());
        }
        let mut flags: Vec<String> = ["-std=c++17", "-O3", "--expt-relaxed-constexpr"].map(String::from).into();
        if !cfg!(target_os = "windows") {
            flags.push("-Xcompiler=-fPIC".into());
        }
        if profile {
            flags.push("-DGDN_PROFILE".into());
        }
        if let Some(bytes) = limit {
            flags.push(format!("-DGDN_SHARED_LIMIT={bytes}"));
        }
        for arch in &archs[usize::from(!archs[0].ends_with('a'))..] {
            flags.push(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
        }
        let cuda = std::env::current_dir().expect("cargo runs build scripts in the package").join("cuda");
        // By this path others find the headers: a checkout that moved is no longer where it was told to be.
        println!("cargo:rerun-if-changed={}", cuda.display());
        println!("cargo::metadata=include={}", cuda.display());
        println!("cargo::metadata=capability={lowest}");
        println!("cargo::metadata=flags={}", flags.join(" "));

        let mut builder = bindgen_cuda::Builder::default()
            .kernel_paths(kernels)
            .watch(all)
            .out_dir(out.clone())
            .compute_cap(lowest as usize);
        for flag in flags {
            builder = builder.arg(Box::leak(flag.into_boxed_str()));
        }
        builder.build_lib(out.join("libcandle_gdn_cuda.a"));
        println!("cargo:rustc-link-search=native={}", out.display());
        println!("cargo:rustc-link-lib=static=candle_gdn_cuda");
        println!("cargo:rustc-link-lib=dylib=cudart");
        if !cfg!(target_os = "windows") {
            println!("cargo:rustc-link-lib=dylib=stdc++");
        }
    }

    /// The capability without its suffix.
    fn number(arch: &str) -> u32 {
        let digits = arch.trim_end_matches(|c: char| c.is_ascii_lowercase());
        digits.parse().unwrap_or_else(|_| panic!("{ARCHS}: expected capabilities such as 80,90a,120, got {arch:?}"))
    }

    fn collect(dir: &Path, kernels: &mut Vec<PathBuf>, all: &mut Vec<PathBuf>) {
        let mut entries: Vec<_> = std::fs::read_dir(dir)
            .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
            .map(|entry| entry.expect("a readable folder").path())
            .collect();
        entries.sort();
        for path in entries {
            match path.extension().and_then(|e| e.to_str()) {
                _ if path.is_dir() => collect(&path, kernels, all),
                Some("cu") => {
                    kernels.push(path.clone());
                    all.push(path);
                }
                Some("cuh" | "h") => all.push(path),
                _ => {}
            }
        }
    }
}
