//! Unmodified C programs under the preloaded library: with far memory that is really local (always), and with the pager and a lender.

use netvm::lender::{Lender, LenderConfig, StopFlag};
use netvm::pager::TierPolicy;
use netvm::runfile::{RunFile, RunParams};
use netvm::stats::PagerStats;
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
    compile_with(name, &[])
}

fn compile_with(name: &str, options: &[&str]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    // Tests compile the same program at the same time.
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let program = folder.join(format!("{name}-{}-{number}", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(format!("{name}.c"));
    let status = Command::new("cc")
        .args(["-O1", "-g", "-Wall", "-Wno-unused-function", "-fno-builtin-malloc", "-pthread", "-o"])
        .args([&program, &source])
        .args(options)
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
fn what_threads_that_end_had_counts() {
    let program = compile("threads");
    let output = preloaded(&program)
        .env("NETVM_PRELOAD_BACKEND", "local")
        .env("NETVM_PRELOAD_SMALL_LOCAL_BYTES", "4000000")
        .output()
        .unwrap();
    must_succeed("threads that end", &output);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let local: u64 = said.split(' ').next().unwrap().parse().unwrap();
    // Of 20 MB; a thread may have 64 KiB that it has not told.
    assert!((3_900_000..4_100_000).contains(&local), "{said}");
    let _ = std::fs::remove_file(program);
}

/// Which the kernel writes to when the threads end, without waiting for a page.
#[test]
fn threads_on_stacks_of_mallocs() {
    run_with_local_area("stacks");
    run_with_pager("stacks", 0, 131_072);
    run_with_tier("stacks", 0, 4096, TierPolicy::Packed);
}

/// Its own functions are used, and it may have its locks when it maps memory.
#[test]
fn a_program_with_an_allocator_of_its_own() {
    run_with_local_area("own");
    run_with_pager("own", 0, 4096);
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

/// With the pager, a lender in this process, and far less local memory than the program uses.
fn run_with_pager(name: &str, small_local_bytes: u64, far_threshold_bytes: u64) -> Option<Output> {
    run_with_tier(name, small_local_bytes, far_threshold_bytes, TierPolicy::Auto)
}

fn run_with_tier(
    name: &str,
    small_local_bytes: u64,
    far_threshold_bytes: u64,
    tier: TierPolicy,
) -> Option<Output> {
    run_with_budget(8 << 20, name, small_local_bytes, far_threshold_bytes, tier)
}

fn run_with_budget(
    budget_bytes: u64,
    name: &str,
    small_local_bytes: u64,
    far_threshold_bytes: u64,
    tier: TierPolicy,
) -> Option<Output> {
    run_with_lender(budget_bytes, name, small_local_bytes, far_threshold_bytes, tier, None)
}

/// The lender listens at a socket in the program's folder, which is its owner's, or here.
fn run_with_lender(
    budget_bytes: u64,
    name: &str,
    small_local_bytes: u64,
    far_threshold_bytes: u64,
    tier: TierPolicy,
    listen: Option<&str>,
) -> Option<Output> {
    run_and_count(budget_bytes, name, small_local_bytes, far_threshold_bytes, tier, listen, &[])
        .map(|(output, _)| output)
}

fn run_and_count(
    budget_bytes: u64,
    name: &str,
    small_local_bytes: u64,
    far_threshold_bytes: u64,
    tier: TierPolicy,
    listen: Option<&str>,
    environment: &[(&str, &str)],
) -> Option<(Output, PagerStats)> {
    if let Err(error) = netvm_sys::uffd::probe() {
        println!("skipped ({name} with the pager): userfaultfd: {error}");
        return None;
    }
    let program = compile(name);
    // Not beside the program: paths of unix sockets must be short.
    let own = program.file_name().unwrap().to_string_lossy().into_owned();
    let folder = std::env::temp_dir().join(format!("netvm-test-{own}-{small_local_bytes}"));
    std::fs::create_dir_all(&folder).unwrap();
    let listen = listen.map_or_else(|| format!("unix:{}", folder.join("lender").display()), str::to_owned);
    let config = LenderConfig { listen: vec![listen], size_bytes: 1 << 30, ..LenderConfig::default() };
    let stop = StopFlag::new().unwrap();
    let mut server = Lender::bind(config).unwrap();
    let lenders = server.addresses();
    let stopped = stop.clone();
    let serving = std::thread::spawn(move || server.run(&stopped).map_err(|error| error.to_string()));
    let run = RunFile::create(
        &folder.join("run"),
        &RunParams {
            budget_bytes,
            area_bytes: 1 << 40,
            small_local_bytes,
            far_threshold_bytes,
            lenders,
            tier,
            ..RunParams::default()
        },
    )
    .unwrap();
    let mut command = preloaded(&program);
    let environment = environment.iter().copied();
    let output = command.env("NETVM_RUN", folder.join("run")).envs(environment).output().unwrap();
    run.reap();
    // A daemon is nobody's child: it may be about to end.
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while run.processes() > 0 && std::time::Instant::now() < patience {
        std::thread::sleep(std::time::Duration::from_millis(10));
        run.reap();
    }
    let stats = run.summary();
    assert_eq!((run.processes(), stats.local_frames), (0, 0), "somebody still has memory");
    stop.stop();
    serving.join().unwrap().unwrap();
    let _ = std::fs::remove_dir_all(folder);
    let _ = std::fs::remove_file(program);
    must_succeed(&format!("{name} with the pager"), &output);
    let out = stats.remote_writes + stats.packed + stats.filled;
    assert!(out > 0 && stats.remote_reads + stats.unpacked > 0, "no page travelled: {stats:?}");
    assert!(stats.local_frames_peak <= budget_bytes / 4096, "over the budget: {stats:?}");
    Some((output, stats))
}

#[test]
fn allocations_with_the_pager() {
    run_with_pager("alloc", 1_000_000, 131_072);
}

#[test]
fn mappings_with_the_pager() {
    run_with_pager("maps", 0, 4096);
    run_with_tier("maps", 0, 4096, TierPolicy::Packed);
}

#[test]
fn a_program_with_too_many_mappings_loses_nothing() {
    run_with_local_area("crowded");
    run_with_pager("crowded", 0, 131_072);
}

#[test]
fn forks_with_the_pager() {
    run_with_pager("forks", 0, 4096);
    run_with_tier("forks", 0, 4096, TierPolicy::Packed);
}

#[test]
fn forks_while_most_pages_are_packed() {
    for tier in [TierPolicy::Packed, TierPolicy::Auto] {
        run_with_tier("packed", 0, 4096, tier);
    }
}

/// Nothing has to leave for them. One that is kept from ending gives up a part of it meanwhile.
#[test]
fn what_is_packed_stays_so_when_children_only_end() {
    let counted = run_and_count(8 << 20, "packed_ends", 0, 4096, TierPolicy::Packed, None, &[]);
    let Some((_, stats)) = counted else { return };
    assert!(stats.packed > 4000 && stats.remote_writes < 1024, "{stats:?}");
}

/// What each would give up goes to lenders once for all; where their memory is shared, for all but the first. Beside it each gives up what was in no
/// pool. Each by itself, they write all of it.
#[test]
fn children_that_live_at_once_share_what_was_packed() {
    for (link, shares) in [("shm", 6), ("socket", 5)] {
        let counted = run_and_count(
            8 << 20,
            "packed_lives",
            0,
            4096,
            TierPolicy::Packed,
            None,
            &[("NETVM_LINK", link)],
        );
        let Some((_, stats)) = counted else { return };
        assert!(stats.packed > 4000 && stats.remote_writes < shares * 6144 / 2, "{link}: {stats:?}");
    }
}

#[test]
fn children_whose_parent_is_killed_or_stands_still_have_all_that_was_packed() {
    for program in ["packed_orphans", "packed_stopped"] {
        for link in ["shm", "socket"] {
            run_and_count(8 << 20, program, 0, 4096, TierPolicy::Packed, None, &[("NETVM_LINK", link)]);
        }
    }
}

#[test]
fn the_c_library_finds_its_own_in_the_middle_of_a_fork() {
    run_with_local_area("libc");
    run_with_pager("libc", 0, 131_072);
    run_with_tier("libc", 0, 4096, TierPolicy::Packed);
}

/// Whatever becomes of the children, the parent's pages are as they were written, and all memory comes back.
#[test]
fn writers_forks_and_children_that_are_killed() {
    run_with_pager("storm", 0, 131_072);
    run_with_tier("storm", 0, 131_072, TierPolicy::Packed);
}

#[test]
fn forks_while_sparse_slabs_are_emptied() {
    run_with_pager("sparse", 0, 4096);
    run_with_tier("sparse", 0, 4096, TierPolicy::Packed);
}

#[test]
fn a_process_ends_with_its_last_thread_not_with_its_first() {
    run_with_pager("last", 0, 4096);
    run_with_local_area("last");
}

#[test]
fn forks_while_others_have_locks() {
    run_with_pager("locks", 0, 131_072);
}

#[test]
fn memory_that_becomes_local_while_it_is_touched() {
    run_with_budget(4 << 20, "register", 0, 131_072, TierPolicy::Auto);
}

#[test]
fn a_child_that_cannot_connect_does_without_and_the_parent_goes_on() {
    for tier in [TierPolicy::Auto, TierPolicy::Packed] {
        let Some(output) = run_with_tier("orphan", 0, 131_072, tier) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(said.matches("netvm: a child of a fork has no far memory").count(), 2, "{said}");
    }
}

/// Of a process that may not read itself in /proc, and of one whose user may not use userfaultfd, with a lender that both can reach.
#[test]
fn children_of_another_user_have_far_memory_or_do_without() {
    let lender = Some("127.0.0.1:0");
    for tier in [TierPolicy::Auto, TierPolicy::Packed] {
        let Some(output) = run_with_lender(8 << 20, "user", 0, 131_072, tier, lender) else { return };
        let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let orphans = said.matches("netvm: a child of a fork has no far memory").count();
        assert_eq!(out, format!("{orphans}\nok\n"), "{said}");
    }
}

#[test]
fn a_child_reads_its_parents_memory_by_itself_until_it_gives_privileges_up() {
    for tier in [TierPolicy::Lender, TierPolicy::Packed] {
        for (link, shared) in [("shm", 1), ("socket", 0)] {
            let Some((output, _)) =
                run_and_count(8 << 20, "inherits", 0, 131_072, tier, None, &[("NETVM_LINK", link)])
            else {
                return;
            };
            assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{shared}\n{shared}\nok\n"));
        }
    }
}

/// With some numbers of descriptors there is a connection, and not all files of what lenders share. (The lender ends when nobody can come any more
/// for what forks left there that could not: after 10 s.)
#[test]
fn children_of_a_process_with_few_descriptors_have_all_or_nothing() {
    for link in ["auto", "shm"] {
        let Some((output, _)) =
            run_and_count(8 << 20, "few", 0, 131_072, TierPolicy::Lender, None, &[("NETVM_LINK", link)])
        else {
            return;
        };
        println!("{link}: {}", String::from_utf8_lossy(&output.stdout).trim());
    }
}

/// The lender's socket is in a folder that only root may enter.
#[test]
fn children_of_a_process_that_has_put_root_aside_have_far_memory() {
    let Some(output) = run_with_pager("aside", 0, 131_072) else { return };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("children_of_a_process_that_has_put_root_aside: {}", said.trim());
    assert!(said == "ok\n" || said.starts_with("skipped"), "{said}");
}

/// Of which the pager's thread has none.
#[test]
fn a_process_that_keeps_capabilities_changes_its_groups() {
    let Some(output) = run_with_pager("keeps", 0, 131_072) else { return };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("a_process_that_keeps_capabilities_changes_its_groups: {}", said.trim());
    assert!(said == "ok\n" || said.starts_with("skipped"), "{said}");
}

/// Before Linux 6.8. By then the process may not open what the pager reads pages by.
#[test]
fn who_gives_root_up_has_far_memory_where_pages_are_copied() {
    let environment = [("NETVM_WITHOUT", "move,poison,wp-async")];
    for (name, listen) in [("worker", Some("127.0.0.1:0")), ("user", Some("127.0.0.1:0")), ("aside", None)] {
        let Some((output, _)) =
            run_and_count(8 << 20, name, 0, 131_072, TierPolicy::Auto, listen, &environment)
        else {
            return;
        };
        println!("{name}: {}", String::from_utf8_lossy(&output.stdout).trim());
    }
}

#[test]
fn tiles_of_a_matrix_in_forks_and_threads() {
    run_with_pager("tiles", 0, 131_072);
}

#[test]
fn thread_local_memory_takes_no_stack_of_ours() {
    run_with_local_area("tls");
    run_with_pager("tls", 0, 131_072);
}

/// Which by then may not use userfaultfd any more.
#[test]
fn workers_that_give_their_privileges_up_have_far_memory() {
    let lender = Some("127.0.0.1:0");
    let Some(output) = run_with_lender(8 << 20, "worker", 0, 131_072, TierPolicy::Auto, lender) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("workers_that_give_their_privileges_up: {}", said.trim());
    assert!(said == "ok\n" || said.starts_with("skipped"), "{said}");
}

#[test]
fn functions_that_are_looked_up_by_a_handle() {
    run_with_local_area("handle");
    run_with_pager("handle", 0, 131_072);
    run_with_pager("handle", 0, 4096);
}

/// Which wraps what netvm's library wraps, too, and would be called by it.
#[test]
fn a_library_behind_ours_that_looks_functions_up_by_a_handle() {
    let (tool, program) =
        (compile_with("behind", &["-DTOOL", "-shared", "-fPIC", "-ldl"]), compile("behind"));
    let libraries = format!("{}:{}", library().display(), tool.display());
    let mut command = preloaded(&program);
    let output = command.env("LD_PRELOAD", libraries).env("NETVM_PRELOAD_BACKEND", "local").output().unwrap();
    must_succeed("behind", &output);
    [tool, program].iter().for_each(|file| drop(std::fs::remove_file(file)));
}

#[test]
fn pages_that_leave_together_with_the_pager() {
    run_with_pager("together", 0, 4096);
    run_with_tier("together", 0, 4096, TierPolicy::Lender);
}

#[test]
fn a_held_thread_hands_nothing_on() {
    let Some(output) = run_with_pager("spawn", 1_000_000, 131_072) else { return };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    // Other tests may take the CPU, and the hold ends; with one CPU there is nothing to hold.
    println!("{}", said.trim());
    assert!(said.contains("CPUs: "), "{said}");
}

#[test]
fn a_run_without_a_lender_says_so_and_ends_with_125() {
    if netvm_sys::uffd::probe().is_err() {
        println!("skipped (no lender): userfaultfd may not be used");
        return;
    }
    let program = compile("tiny");
    let folder = program.with_extension("no-lender");
    std::fs::create_dir_all(&folder).unwrap();
    let params = RunParams {
        budget_bytes: 8 << 20,
        area_bytes: 1 << 40,
        small_local_bytes: 1 << 20,
        far_threshold_bytes: 128 << 10,
        lenders: vec![format!("unix:{}", folder.join("nobody").display())],
        ..RunParams::default()
    };
    let _run = RunFile::create(&folder.join("run"), &params).unwrap();
    // A program that needs no far memory does not even look for the lender.
    let output = preloaded(&program).env("NETVM_RUN", folder.join("run")).output().unwrap();
    assert!(output.status.success() && output.stdout == b"Threads:\t1\n", "{output:?}");
    let output = preloaded(&program).arg("1000000").env("NETVM_RUN", folder.join("run")).output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("netvm: ") && said.contains("nobody") && said.lines().count() == 1, "{said}");
    let _ = std::fs::remove_dir_all(folder);
    let _ = std::fs::remove_file(program);
}
