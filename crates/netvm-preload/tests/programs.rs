//! Unmodified C programs under the preloaded library: with far memory that is really local (always), and with the pager and a lender.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The library under test. Cargo builds it before these tests, beside them or one directory up.
fn library() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let candidates = here.ancestors().skip(1).take(2).map(|folder| folder.join("libnetvm_preload.so"));
    let newest = candidates
        .filter(|path| path.exists())
        .max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    newest.expect("libnetvm_preload.so is not beside the tests")
}

fn compile(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let program = folder.join(format!("{name}-{}", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(format!("{name}.c"));
    let status = Command::new("cc")
        .args(["-O1", "-g", "-Wall", "-Wno-unused-function", "-fno-builtin-malloc", "-pthread", "-o"])
        .args([&program, &source])
        .status()
        .expect("these tests need a C compiler named cc");
    assert!(status.success(), "{name}.c does not compile");
    program
}

fn preloaded(program: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg("120").arg(program);
    // `env` would be preloaded too: what counts is that `timeout` itself does not mind.
    command.env("LD_PRELOAD", library()).env_remove("NETVM_RUN").env_remove("NETVM_PRELOAD_BACKEND");
    command
}

fn must_succeed(what: &str, output: &Output) {
    assert!(
        output.status.success() && output.stdout.ends_with(b"ok\n"),
        "{what}: {}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Everything far, some of it far, and none started.
fn run_with_local_area(name: &str) {
    let program = compile(name);
    for (small_local_bytes, far_threshold_bytes) in [("0", "4096"), ("1000000", "131072")] {
        let output = preloaded(&program)
            .env("NETVM_PRELOAD_BACKEND", "local")
            .env("NETVM_PRELOAD_SMALL_LOCAL_BYTES", small_local_bytes)
            .env("NETVM_PRELOAD_FAR_THRESHOLD_BYTES", far_threshold_bytes)
            .output()
            .unwrap();
        must_succeed(&format!("{name} with thresholds {small_local_bytes}, {far_threshold_bytes}"), &output);
    }
    must_succeed(&format!("{name} outside a run"), &preloaded(&program).output().unwrap());
    let _ = std::fs::remove_file(program);
}

#[test]
fn allocations_with_a_local_area() {
    run_with_local_area("alloc");
}

#[test]
fn mappings_with_a_local_area() {
    run_with_local_area("maps");
}

#[test]
fn forks_with_a_local_area() {
    run_with_local_area("forks");
}

#[test]
fn a_small_area_is_out_of_memory_not_local() {
    let program = compile("tiny");
    let output = preloaded(&program)
        .arg("400000000")
        .env("NETVM_PRELOAD_BACKEND", "local")
        .env("NETVM_PRELOAD_AREA_BYTES", "100000000")
        .output()
        .unwrap();
    // memset(NULL): the allocation failed as it should.
    assert!(!output.status.success());
    let _ = std::fs::remove_file(program);
}
