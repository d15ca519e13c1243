use super::*;

fn chosen(listed: &[&str], model: &str) -> Result<Vec<String>> {
    let listed: Vec<String> = listed.iter().map(|file| file.to_string()).collect();
    choose(&listed, &Name::parse(model, None, "").unwrap().unwrap())
}

#[track_caller]
fn chooses(listed: &[&str], model: &str, want: &[&str]) {
    assert_eq!(chosen(listed, model).unwrap(), want, "{model}");
}

#[track_caller]
fn refuses(listed: &[&str], model: &str, parts: &[&str]) {
    let message = chosen(listed, model).unwrap_err().to_string();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

/// As the repositories of well-known converters name their files.
const MANY: &[&str] = &[
    "README.md",
    "BF16/Model-4B-BF16-00001-of-00002.gguf",
    "BF16/Model-4B-BF16-00002-of-00002.gguf",
    "Model-4B-IQ4_XS.gguf",
    "Model-4B-MXFP4_MOE.gguf",
    "Model-4B-Q4_K_M.gguf",
    "Model-4B-Q5_K_M.gguf",
    "Model-4B-UD-Q4_K_XL.gguf",
    "Model-4B-UD-Q5_K_M.gguf",
    "imatrix.gguf",
    "mmproj-F16.gguf",
    "mtp-Model-4B-Q5_K_M.gguf",
];

#[test]
fn types_name_files() {
    chooses(MANY, "a/b", &["Model-4B-Q4_K_M.gguf"]);
    chooses(MANY, "a/b:latest", &["Model-4B-Q4_K_M.gguf"]);
    chooses(MANY, "a/b:iq4_xs", &["Model-4B-IQ4_XS.gguf"]);
    chooses(MANY, "a/b:MXFP4_MOE", &["Model-4B-MXFP4_MOE.gguf"]);
    // The plain type before its variant; the variant where it is the only one.
    chooses(MANY, "a/b:q5_k_m", &["Model-4B-Q5_K_M.gguf", "mtp-Model-4B-Q5_K_M.gguf"]);
    chooses(MANY, "a/b:UD-Q5_K_M", &["Model-4B-UD-Q5_K_M.gguf"]);
    chooses(MANY, "a/b:Q4_K_XL", &["Model-4B-UD-Q4_K_XL.gguf"]);
    chooses(MANY, "a/b:bf16", &MANY[1..3]);
    refuses(MANY, "a/b:Q4_K", &["no GGUF file of type Q4_K", "BF16, IQ4_XS, MXFP4_MOE, Q4_K_M, Q5_K_M, UD-Q4_K_XL"]);
    refuses(MANY, "a/b:F16", &["no GGUF file of type F16"]);
}

#[test]
fn paths_name_files() {
    chooses(MANY, "a/b/Model-4B-IQ4_XS.gguf", &["Model-4B-IQ4_XS.gguf"]);
    chooses(MANY, "a/b/BF16/Model-4B-BF16-00002-of-00002.gguf", &MANY[1..3]);
    chooses(MANY, "hf.co/a/b/tree/main/BF16", &MANY[1..3]);
    chooses(MANY, "a/b:Model-4B-IQ4_XS.gguf", &["Model-4B-IQ4_XS.gguf"]);
    refuses(MANY, "a/b/other.gguf", &["a/b", "no GGUF file other.gguf"]);
    refuses(&MANY[2..], "a/b:BF16", &["1 of the 2 parts"]);
}

#[test]
fn names_of_other_shapes() {
    for (file, want) in [
        ("qwen_q4_k_m.gguf", "q4_k_m"),
        ("Qwen3.5-0.8B.i1-Q6_K.gguf", "Q6_K"),
        ("Model-Q8_0-imat.GGUF", "Q8_0"),
        ("Q4_0/model.gguf", "Q4_0"),
        ("model-TQ1_0.gguf", "TQ1_0"),
    ] {
        assert_eq!(label(whole(file)), Some(want), "{file}");
    }
    assert_eq!(label("Qwen3-4B-A3B-model"), None);
    chooses(&["model.gguf", "mmproj-BF16.gguf"], "a/b", &["model.gguf"]);
    refuses(&["A-Q4_K_M.gguf", "B-Q4_K_M.gguf"], "a/b", &["several", "a/b/FILE.gguf", "A-Q4_K_M, B-Q4_K_M"]);
    refuses(&["a-Q8_0.gguf", "a-F16.gguf"], "a/b", &["no Q4_K_M", "a/b:TYPE", "F16, Q8_0"]);
    refuses(&["model.safetensors"], "a/b:Q8_0", &["no GGUF file"]);
}
