//! Sizes, offsets and constants as a C compiler sees them in a header.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// Fails where the compiled header has another number than a line. A line is the name of a constant and its value,
/// `struct name` and its size, or `struct_name.field` with the field's offset and size.
pub fn compare(header: &str, lines: &[(String, Vec<i64>)]) {
    let mut program = format!("#include \"{header}\"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n");
    for (name, _) in lines {
        let name = name.replace("r#", ""); // a keyword in Rust alone
        let numbers = match (name.strip_prefix("struct "), name.split_once('.')) {
            (Some(name), _) => format!("\"%lld\\n\", (long long)sizeof({name})"),
            (None, Some((name, field))) => {
                format!(
                    "\"%lld %lld\\n\", (long long)offsetof({name}, {field}), (long long)sizeof((({name} *)0)->{field})"
                )
            }
            (None, None) => format!("\"%lld\\n\", (long long)({name})"),
        };
        writeln!(program, "  printf({numbers});").expect("a string grows");
    }
    program.push_str("  return 0;\n}\n");

    let dir = tempfile::tempdir().expect("a folder");
    let (source, binary) = (dir.path().join("layout.c"), dir.path().join("layout"));
    std::fs::write(&source, program).expect("a file");
    // This file is compiled into two packages, which lie in different folders.
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = folders.find(|folder| folder.join("cuda/gdn.h").exists()).expect("the repository's root");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut compile = Command::new(&compiler);
    for include in ["cuda", "models/cuda"] {
        compile.arg("-I").arg(root.join(include));
    }
    let compiled = compile.args(["-std=c11", "-Wall", "-Werror", "-o"]).arg(&binary).arg(&source).output();
    let compiled = compiled.unwrap_or_else(|error| panic!("{compiler}: {error}: no C compiler"));
    assert!(compiled.status.success(), "{header}: {}", String::from_utf8_lossy(&compiled.stderr));
    let out = Command::new(&binary).output().expect("the program runs").stdout;
    let out = String::from_utf8(out).expect("numbers");
    assert_eq!(out.lines().count(), lines.len(), "{out}");
    for ((name, rust), c) in lines.iter().zip(out.lines()) {
        let c: Vec<i64> = c.split(' ').map(|number| number.parse().expect("a number")).collect();
        assert_eq!(*rust, c, "{header}: {name} in Rust and in C");
    }
}
