//! Tests of the run file.

use super::life::Identity;
use super::*;
use netvm_sys::stat::Stat;

fn params() -> RunParams {
    RunParams {
        budget_bytes: 100 * PAGE_BYTES,
        area_bytes: 1 << 40,
        small_local_bytes: 16 << 20,
        far_threshold_bytes: 128 << 10,
        lenders: vec!["unix:/tmp/a socket, and more".into(), "ünïcode:1".into()],
        names: vec!["file in /tmp, or where".into(), "ünïcode:1".into()],
        replicas: 2,
        erasure: Erasure::new(4, 2),
        encrypt_pages: true,
        security: Security {
            secret: Some(Secret::from_bytes(std::array::from_fn(|index| index as u8))),
            encryption: Encryption::Always,
            insecure: false,
        },
        private_lender: 77,
        tier: Policy::Packed,
        fault_path: FaultPath::Spin,
        page_bytes: 65536,
        verbose: true,
        learn: "/tmp/a record".into(),
        command: "sort ünïcode".into(),
    }
}

fn run(name: &str) -> (std::path::PathBuf, Arc<RunFile>) {
    let path = std::env::temp_dir().join(format!("netvm-runfile-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let run = RunFile::create(&path, &params()).unwrap();
    (path, run)
}

#[test]
fn any_number_in_the_file_is_lived_with() {
    let (path, run) = run("numbers");
    let texts = [LENDERS, LENDERS + 1, MESSAGE, COMMAND, LEARN, NAMES];
    for index in (BUILD + 1..LENDERS).chain(texts).chain(RETIRED..SLOTS + 2 * SLOT_WORDS) {
        for value in [1, SLOT_COUNT as u64 + 1, u64::from(u32::MAX), u64::MAX] {
            let before = run.word(index).swap(value, Relaxed);
            let opened = RunFile::open(&path).unwrap();
            let _ = (
                opened.params(),
                opened.summary(),
                opened.detail(),
                opened.message(),
                opened.lost_lenders(),
                opened.classes(),
            );
            let _ = (opened.each_process(), opened.each_detail(), opened.is_supervised(), opened.stuck());
            let slot = opened.join(std::process::id()).unwrap();
            let granted = slot.grow(10);
            slot.set_starving(true);
            let _ = (slot.fair_share(), slot.others_starve(), slot.is_shard(), slot.pinned_elsewhere());
            slot.set_starving(false);
            slot.release(granted);
            opened.reap_all();
            run.word(index).store(before, Relaxed);
        }
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn parameters_survive_and_strangers_are_refused() {
    let (path, run) = run("params");
    assert_eq!(RunFile::open(&path).unwrap().params(), params());
    assert_eq!(run.classes(), [Class::Remote; 2]);
    RunFile::open(&path).unwrap().set_class(1, Class::Nearby);
    run.set_class(64, Class::File);
    assert_eq!(run.classes(), [Class::Remote, Class::Nearby]);
    assert_eq!(run.lender_names()[0], "file in /tmp, or where");
    run.join(std::process::id()).unwrap().add_gone(1, 2);
    let gone = (run.lost_lenders(), run.left_lenders());
    assert_eq!(gone, (vec!["file in /tmp, or where".to_owned()], vec!["ünïcode:1".to_owned()]));
    // It holds the secret.
    let mode = std::os::unix::fs::MetadataExt::mode(&path.metadata().unwrap());
    assert_eq!(mode & 0o777, 0o600);
    assert!(RunFile::create(&path, &params()).is_err());
    // Of another build, with fields of other meanings, and of an older one, which had fewer.
    for (magic, build, words) in
        [(MAGIC, !BUILD_OF_THIS, WORDS), (u64::from_le_bytes(*b"netvmrn1"), 100, 700)]
    {
        let words = [magic, build].into_iter().chain(std::iter::repeat_n(0, words - 2));
        std::fs::write(&path, words.flat_map(u64::to_le_bytes).collect::<Vec<_>>()).unwrap();
        let said = RunFile::open(&path).unwrap_err().to_string();
        assert!(said.contains("another build") && said.contains("installed together"), "{said}");
    }
    std::fs::write(&path, vec![7; WORDS * 8]).unwrap();
    assert!(RunFile::open(&path).unwrap_err().to_string().contains("not a run file"));
    std::fs::write(&path, "short").unwrap();
    assert!(RunFile::open(&path).is_err());
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn the_budget_is_never_exceeded() {
    let (path, run) = run("budget");
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let mine = run.join(std::process::id()).unwrap();
    let other = run.join(child.id()).unwrap();
    assert_eq!((mine.grow(80), other.grow(30), other.grow(5)), (80, 20, 0));
    assert_eq!(mine.floor(), FLOOR_FRAMES);
    run.word(PAGE_SIZE).store(2 << 20, Relaxed);
    assert_eq!(mine.floor(), 4 * 512);
    assert_eq!((mine.fair_share(), run.summary().local_frames_peak), (50, 100));
    other.set_starving(true);
    other.set_starving(true);
    assert!(mine.others_starve() && !other.others_starve());
    assert!(mine.set_message("the first") && other.set_message("the second"));
    assert_eq!(run.message().as_deref(), Some("the first"));
    mine.release(30);
    assert_eq!(other.grow(64), 30);
    let mut detail = PagerDetail::default();
    detail.reads.note(50_000);
    detail.heat.note(7);
    detail.hold([4096].into_iter());
    other.publish(&PagerStats { faults: 5, far_pages: 9, ..PagerStats::default() }, &detail);
    assert_eq!(run.each_detail()[1].1, detail);
    assert_eq!(run.detail(), detail);
    child.kill().unwrap();
    child.wait().unwrap();
    run.reap();
    assert!(!mine.others_starve());
    assert_eq!((run.processes(), mine.grow(100)), (1, 50));
    let sum = run.summary();
    assert_eq!((sum.faults, sum.far_pages), (5, 0));
    assert_eq!((run.detail().reads, run.detail().heat), (detail.reads, Default::default()));
    assert_eq!((run.detail().lender_held[0], run.detail().lender_held_peak[0]), (0, 4096));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn joining_again_gives_back_what_was_held_before_exec() {
    let (path, run) = run("exec");
    let before = run.join(std::process::id()).unwrap();
    before.grow(60);
    let after = run.join(std::process::id()).unwrap();
    assert_eq!((run.processes(), after.grow(100)), (1, 100));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_program_that_begins_gives_back_what_was_held_before_exec() {
    let (path, run) = run("begins");
    assert_eq!(run.join(std::process::id()).unwrap().grow(60), 60);
    RunFile::open(&path).unwrap().begin();
    assert_eq!((run.processes(), run.used()), (0, 0));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn what_a_process_held_comes_back_when_it_is_another_program() {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};
    let (path, run) = run("becomes");
    // The same file.
    let mut shell = Command::new("sh");
    shell.args(["-c", "echo; read line; exec sh -c 'echo; read line'"]).stdin(Stdio::piped());
    let mut other = shell.stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (other.stdin.take().unwrap(), other.stdout.take().unwrap());
    output.read_exact(&mut [0]).unwrap();
    let slot = run.join(other.id()).unwrap();
    assert_eq!(slot.grow(60), 60);
    run.reap();
    assert_eq!((run.processes(), run.used()), (1, 60));
    // As it would have done by itself.
    slot.word(SLOT_IMAGE).store(Identity::new(Stat::of(other.id()).as_ref()).image, Relaxed);
    run.reap();
    assert_eq!((run.processes(), run.used()), (1, 60));
    input.write_all(b"\n").unwrap();
    output.read_exact(&mut [0]).unwrap();
    run.reap();
    assert_eq!((run.processes(), run.used()), (0, 0));
    drop(input);
    other.wait().unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn whose_start_is_not_known_is_not_taken_for_gone() {
    let (path, run) = run("unknown");
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let slot = run.join(other.id()).unwrap();
    assert_eq!(slot.grow(60), 60);
    // As if it had had no descriptor left to look.
    slot.word(SLOT_STARTED).store(0, Relaxed);
    run.reap();
    assert_eq!((run.processes(), run.used()), (1, 60));
    slot.word(SLOT_STARTED).store(1, Relaxed);
    run.reap();
    assert_eq!((run.processes(), run.used()), (0, 0));
    // Nor is it two processes when it comes again.
    run.join(other.id()).unwrap().word(SLOT_STARTED).store(0, Relaxed);
    run.join(other.id()).unwrap();
    assert_eq!(run.processes(), 1);
    other.kill().unwrap();
    other.wait().unwrap();
    run.reap();
    assert_eq!((run.processes(), run.used()), (0, 0));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn processes_of_another_name_space_are_for_others_to_look_at() {
    let (path, run) = run("space");
    // Not one that sees them all.
    run.word(SUPERVISOR_SPACE).store(0, Relaxed);
    // As if it had this number elsewhere; here nobody has it.
    let mut gone = std::process::Command::new("true").spawn().unwrap();
    let slot = run.join(gone.id()).unwrap();
    gone.wait().unwrap();
    let space = slot.word(SLOT_SPACE).load(Relaxed);
    slot.word(SLOT_SPACE).store(space + 1, Relaxed);
    assert_eq!(slot.grow(60), 60);
    run.reap();
    assert_eq!((run.processes(), run.used(), run.pids()), (1, 60, vec![]));
    // Nor does one that has the same number here take its place.
    let other = run.join(std::process::id()).unwrap();
    other.word(SLOT_SPACE).store(space + 1, Relaxed);
    let mine = run.join(std::process::id()).unwrap();
    assert_eq!((run.processes(), mine.grow(100), run.pids()), (3, 40, vec![std::process::id()]));
    slot.word(SLOT_SPACE).store(space, Relaxed);
    run.reap();
    assert_eq!((run.processes(), run.used()), (2, 40));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn the_supervisors_name_space_sees_who_is_gone_in_those_within() {
    let (path, run) = run("within");
    let slot = run.join(std::process::id()).unwrap();
    let space = slot.word(SLOT_SPACE).load(Relaxed);
    let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let held = run.join(other.id()).unwrap();
    assert_eq!(held.grow(60), 60);
    held.word(SLOT_SPACE).store(space + 1, Relaxed);
    run.note_stuck(slot.base);
    assert_eq!(run.stuck(), Some(Stuck { pid: Some(std::process::id()), holder: None, frames: 60 }));
    // Where not all are seen, and where it is not known which space it was.
    run.word(SUPERVISOR_SPACE).store(space + 2, Relaxed);
    run.reap_all();
    assert_eq!((run.processes(), run.used()), (2, 60));
    run.word(SUPERVISOR_SPACE).store(space, Relaxed);
    held.word(SLOT_SPACE).store(0, Relaxed);
    run.reap_all();
    assert_eq!((run.processes(), run.used()), (2, 60));
    // Nobody has this number in that space.
    held.word(SLOT_SPACE).store(space + 1, Relaxed);
    run.reap_all();
    assert_eq!((run.processes(), run.used(), run.pids()), (1, 0, vec![std::process::id()]));
    other.kill().unwrap();
    other.wait().unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn who_has_come_back_meanwhile_is_not_given_up() {
    let (path, run) = run("back");
    let slot = run.join(std::process::id()).unwrap();
    slot.grow(60);
    let (pid, then) = (std::process::id().into(), run.identity(slot.base));
    run.retire(slot.base, pid, Identity { image: !then.image, ..then });
    assert_eq!((run.processes(), run.used()), (1, 60));
    run.retire(slot.base, pid, then);
    assert_eq!((run.processes(), run.used()), (0, 0));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn threads_share_the_budget_exactly() {
    let (path, run) = run("threads");
    let slot = run.join(std::process::id()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for step in 0..20_000 {
                    let granted = slot.grow(step % 40);
                    slot.release(granted);
                }
            });
        }
    });
    assert_eq!(slot.grow(1000), 100);
    std::fs::remove_file(&path).unwrap();
}
