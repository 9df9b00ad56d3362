//! What needs a process of its own: it ends, forks, or has other handlers.

use crate::common::mapped::{churn, mapped, set_word, word};
use crate::common::{Random, Serving, alone_in_thread, lend};
use crate::{PAGE, READ_WRITE, start};
use netvm::lender::LinkChoice;
use netvm::pager::{FaultPath, LOCAL_BYTES_MIN, STRIPE_BYTES};
use netvm_sys::shared::SharedSlice;
use std::sync::atomic::{AtomicBool, Ordering};

const ROLE: &str = "NETVM_TEST_ROLE";

/// A process that plays a role with far memory of its own.
fn player(role: &str, lender: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--ignored", "--nocapture", "processes::role"])
        .env(ROLE, format!("{role} {lender}"));
    command
}

/// How it ended.
fn play(role: &str, lender: &str) -> std::process::Output {
    player(role, lender).output().unwrap()
}

/// What had SIGBUS before [`chaining_handler`].
static CHAINED: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
static CHAINS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// As a program must set one that comes after the pager's.
extern "C" fn chaining_handler(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    if CHAINS.fetch_add(1, Ordering::Relaxed) > 1_000_000 {
        // SAFETY: ends the process.
        unsafe { libc::_exit(43) };
    }
    type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: it was set with SA_SIGINFO.
    let before = unsafe { std::mem::transmute::<usize, Handler>(*CHAINED.get().unwrap()) };
    before(signal, info, context);
}

/// A file that is mapped in the place of far memory, and cut off: its bus errors are no faults of ours.
fn beyond_a_file_at(address: usize) {
    let name = std::env::temp_dir().join(format!("netvm-cut-off-{}", std::process::id()));
    let file = std::fs::File::options().create_new(true).read(true).write(true).open(&name).unwrap();
    std::fs::remove_file(&name).unwrap();
    file.set_len(PAGE as u64).unwrap();
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: the range is far memory that nobody refers to; to read beyond the file is what is tested.
    unsafe {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let at = libc::mmap(address as *mut libc::c_void, PAGE, READ_WRITE, flags, fd, 0);
        assert_eq!(at as usize, address);
        assert_eq!(at.cast::<u8>().read_volatile(), 0);
        file.set_len(0).unwrap();
        at.cast::<u8>().read_volatile();
    }
}

extern "C" fn own_handler(_: i32) {
    // SAFETY: ends the process.
    unsafe { libc::_exit(42) };
}

/// What a process of [`play`] does.
#[test]
#[ignore = "started by other tests"]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    // With a link, if it is to be another than a socket.
    let (role, lender) = role.split_once(' ').unwrap();
    let (role, link) =
        role.strip_suffix("-shm").map_or((role, LinkChoice::Socket), |role| (role, LinkChoice::Shm));
    // Whoever repeats an access for ever ends, too.
    // SAFETY: the signal's default ends the process.
    unsafe { libc::alarm(100) };
    if role.starts_with("handler") {
        // SAFETY: the handler only ends the process.
        unsafe { libc::signal(libc::SIGBUS, own_handler as *const () as usize) };
    }
    let pager = start(&[lender], LOCAL_BYTES_MIN, |config| {
        config.link = link;
        if role.ends_with("shards") {
            (config.shards, config.local_bytes) = (2, 2 * LOCAL_BYTES_MIN);
        }
        if ["touch-shards", "lost-thread"].contains(&role) {
            config.fault_path = FaultPath::Thread;
        }
    });
    // Of shards in two stripes.
    let offset = if role.ends_with("shards") { STRIPE_BYTES - LOCAL_BYTES_MIN as usize } else { 0 };
    let memory = mapped(&pager, offset, 2 * LOCAL_BYTES_MIN as usize);
    match role {
        // Beyond the end of a file.
        "handler" | "no-handler" => {
            churn(memory, 3, 3000);
            let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
            let bytes = file.metadata().unwrap().len() as usize;
            // SAFETY: a new mapping; reading beyond the file is what is tested.
            unsafe {
                let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
                let all = bytes.next_multiple_of(PAGE) + PAGE;
                let at = libc::mmap(std::ptr::null_mut(), all, libc::PROT_READ, libc::MAP_PRIVATE, fd, 0);
                assert_ne!(at, libc::MAP_FAILED);
                at.cast::<u8>().add(all - 1).read_volatile();
            }
        }
        // There, or never mapped.
        "cut-off" | "cut-off-outside" | "handler-cut-off" => {
            churn(memory, 3, 3000);
            set_word(memory, 512, 1);
            let outside = if role == "cut-off-outside" { 1 << 30 } else { PAGE };
            beyond_a_file_at(pager.area().start + outside);
        }
        // A program's handler that came after the first of two pagers.
        "chained" => {
            // SAFETY: the handler only calls the one before, in the same circumstances.
            unsafe {
                let mut action = std::mem::zeroed::<libc::sigaction>();
                libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut action);
                CHAINED.set(action.sa_sigaction).unwrap();
                action.sa_sigaction = chaining_handler as *const () as usize;
                libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
            }
            let second = start(&[lender], LOCAL_BYTES_MIN, |_| {});
            for pager in [&pager, &second] {
                churn(mapped(pager, 1 << 30, 2 * LOCAL_BYTES_MIN as usize), 3, 3000);
            }
            assert!(CHAINS.load(Ordering::Relaxed) > 1000);
            beyond_a_file_at(pager.area().start + PAGE);
        }
        // Served by the pagers' threads: what is not inherited is not there, in any shard.
        "touch-shards" => {
            (0..memory.len() / PAGE).for_each(|page| set_word(memory, page * 512, 1));
            for page in [0, memory.len() / PAGE - 1] {
                // SAFETY: the child reads one word, and ends.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    std::hint::black_box(word(memory, page * 512));
                    // SAFETY: ends the child.
                    unsafe { libc::_exit(1) };
                }
                let mut status = 0;
                // SAFETY: a local.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
            }
            (0..memory.len() / PAGE).for_each(|page| assert_eq!(word(memory, page * 512), 1));
            std::process::exit(21);
        }
        "fork" | "fork-shards" => {
            let end = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| (0..40).for_each(|seed| churn_once(memory, seed, &end)));
                for _ in 0..20 {
                    // SAFETY: the child makes system calls, and calls that allocate nothing before they refuse.
                    let child = unsafe { libc::fork() };
                    if child == 0 {
                        let refused = pager.map(pager.area().start, PAGE, READ_WRITE).is_err();
                        // SAFETY: ends the child.
                        unsafe { libc::_exit(if refused { 7 } else { 1 }) };
                    }
                    let mut status = 0;
                    // SAFETY: a local.
                    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
                }
                end.store(true, Ordering::Relaxed);
            });
            std::process::exit(21);
        }
        // Who has its parent's memory until it executes another program has all of it.
        "vfork" => {
            extern "C" fn child(memory: *mut libc::c_void) -> libc::c_int {
                // SAFETY: the parent's local, which lives while the parent waits.
                let memory = unsafe { *memory.cast::<SharedSlice>() };
                let is_there = (0..memory.len() / PAGE).all(|page| {
                    let (of, was) = (page * 512, word(memory, page * 512));
                    set_word(memory, of, was + 1);
                    was == page as u64
                });
                if is_there { 7 } else { 1 }
            }
            (0..memory.len() / PAGE).for_each(|page| set_word(memory, page * 512, page as u64));
            let (mut stack, mut memory_of_child) = (vec![0_u128; 1 << 16], memory);
            let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
            // SAFETY: the end of a stack of a MiB, which the child alone uses; it ends before clone returns here.
            let pid = unsafe {
                let top = stack.as_mut_ptr().add(stack.len()).cast();
                libc::clone(child, top, flags, std::ptr::from_mut(&mut memory_of_child).cast())
            };
            let mut status = 0;
            // SAFETY: a local.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
            (0..memory.len() / PAGE).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
            std::process::exit(21);
        }
        "lost" | "lost-thread" => loop {
            churn(memory, 3, 3000);
            pager.map(pager.area().start, memory.len(), READ_WRITE).unwrap();
        },
        _ => unreachable!(),
    }
    std::process::exit(1);
}

fn churn_once(memory: SharedSlice, seed: u64, end: &AtomicBool) {
    if !end.load(Ordering::Relaxed) {
        let mut random = Random::new(seed);
        for _ in 0..3000 {
            let page = random.next() as usize % (memory.len() / PAGE);
            set_word(memory, page * 512 + 1, page as u64);
            assert_eq!(word(memory, page * 512 + 1), page as u64);
        }
    }
}

#[test]
fn other_bus_errors_go_where_they_went_before() {
    use std::os::unix::process::ExitStatusExt;
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let ended = play("handler", lent.address());
    assert_eq!(ended.status.code(), Some(42), "{ended:?}");
    let ended = play("no-handler", lent.address());
    assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{ended:?}");
}

/// Bus errors of far addresses that the pager can do nothing about are not repeated for ever.
#[test]
fn bus_errors_of_what_has_taken_the_place_of_far_memory_end_the_process() {
    use std::os::unix::process::ExitStatusExt;
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    for role in ["cut-off", "cut-off-outside"] {
        let ended = play(role, lent.address());
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{role}: {ended:?}");
    }
    let ended = play("handler-cut-off", lent.address());
    assert_eq!(ended.status.code(), Some(42), "{ended:?}");
}

#[test]
fn a_second_pager_comes_after_a_handler_that_passes_on() {
    use std::os::unix::process::ExitStatusExt;
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let ended = play("chained", lent.address());
    assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{ended:?}");
}

#[test]
fn a_child_of_a_fork_has_no_far_memory_and_does_not_hang() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    for role in ["fork", "fork-shm", "fork-shards", "fork-shards-shm", "touch-shards", "touch-shards-shm"] {
        let ended = play(role, lent.address());
        assert_eq!(ended.status.code(), Some(21), "{role}: {ended:?}");
    }
}

#[test]
fn a_child_of_vfork_has_its_parents_far_memory() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    for role in ["vfork", "vfork-shm"] {
        let ended = play(role, lent.address());
        assert_eq!(ended.status.code(), Some(21), "{role}: {ended:?}");
    }
}

/// To a socket, too, which cannot be opened by its name; and in a file behind what is there.
#[test]
fn what_it_says_goes_wherever_standard_error_does() {
    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;
    let Some(_alone) = alone_in_thread() else { return };
    let say = |role: &str, shown: OwnedFd| {
        let lent = Serving::new(64);
        let address = lent.address.clone();
        let mut player = player(role, &address).stderr(shown).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_secs(1));
        drop(lent);
        assert!(!player.wait().unwrap().success());
        address
    };
    // By the thread that faults, and by the pager's.
    for role in ["lost", "lost-thread"] {
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let address = say(role, theirs.into());
        let mut said = String::new();
        ours.read_to_string(&mut said).unwrap();
        assert!(said.contains(&address) && said.contains("far memory is lost"), "{said}");
        let name = std::env::temp_dir().join(format!("netvm-said-{}", std::process::id()));
        let mut file = std::fs::File::create(&name).unwrap();
        file.write_all(b"before\n").unwrap();
        let address = say(role, file.try_clone().unwrap().into());
        file.write_all(b"after\n").unwrap();
        let said = std::fs::read_to_string(&name).unwrap();
        std::fs::remove_file(&name).unwrap();
        assert!(said.starts_with("before\n") && said.ends_with("after\n"), "{said}");
        assert!(said.contains(&address) && said.contains("far memory is lost"), "{said}");
    }
}

#[test]
fn without_its_lender_the_process_ends_and_says_why() {
    use std::os::unix::process::ExitStatusExt;
    let Some(_alone) = alone_in_thread() else { return };
    for role in ["lost", "lost-shm"] {
        let lent = Serving::new(64);
        let address = lent.address.clone();
        let player = std::thread::spawn(move || play(role, &address));
        std::thread::sleep(std::time::Duration::from_secs(1));
        let address = lent.address.clone();
        drop(lent);
        let ended = player.join().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{role}: {said}");
        assert!(said.contains(&address) && said.contains("far memory is lost"), "{role}: {said}");
    }
}
