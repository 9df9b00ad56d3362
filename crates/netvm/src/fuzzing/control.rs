//! Messages of control: requests to locks and groups, the calls of a borrower, copies, shared memory, the file of a run.

use std::sync::atomic::{AtomicU64, Ordering};

use netvm_core::copy;
use netvm_core::limits::{CONDITIONS_MAX, SYNC_OBJECTS_MAX, TICKETS_MAX};
use netvm_core::sync::{Home, Kind, Reply, Request, SessionId, Ticket};

use super::Input;
use crate::runfile::{RunFile, RunParams};
use crate::security::Security;

const SESSIONS: u64 = 3;

/// See the module.
///
/// # Panics
/// When something is wrong.
pub fn control(data: &[u8]) {
    let mut input = Input(data);
    // The file takes longer than all others together.
    match input.below(16) {
        3 => run_file(input),
        1 | 5 | 9 | 13 => crate::lender::fuzz(input.0),
        2 | 6 | 10 | 14 => bodies(input.0),
        _ => home(input),
    }
}

/// Three processes that ask one home for whatever they like.
fn home(mut input: Input<'_>) {
    let mut home: Home = Home::default();
    let conditions = input.below(CONDITIONS_MAX) as u32;
    let kinds = [
        Kind::LOCK,
        Kind::Monitor { conditions },
        Kind::ReadWriteLock,
        Kind::Semaphore { permits: u32::from_le_bytes(input.array()) },
        Kind::WaitQueue,
        Kind::Group { parties: 1 + input.below(5) as u32 },
    ];
    let mut objects: Vec<_> = kinds.iter().filter_map(|&kind| home.create(kind)).collect();
    while !input.is_empty() {
        let session = SessionId(input.below(SESSIONS as usize) as u64);
        let object = input.below(objects.len());
        match input.below(16) {
            0 => home.session_ended(session),
            1 => {
                let ticket = Ticket { slot: u16::from(input.byte()), generation: 0 };
                home.released(session, ticket);
            }
            2 => {
                home.close(objects[object]);
                let kind = Kind::from_u64(u64::from_le_bytes(input.array())).unwrap_or(Kind::WaitQueue);
                if let Some(new) = home.create(kind) {
                    objects[object] = new;
                }
            }
            3 => while home.signal().is_some() {},
            4 => {
                let body = input.piece();
                if let Some(request) = Request::decode(body) {
                    home.handle(session, objects[object], request);
                }
            }
            _ => {
                // A sound request with small numbers.
                let mut body = [0; 20];
                (body[0], body[1]) = (1 + input.byte() % 15, input.byte() % 4);
                for index in [2, 4, 12, 16] {
                    body[index] = input.byte() % 8;
                }
                let more = input.below(40);
                let body = [&body, input.bytes(more)].concat();
                if let Some(request) = Request::decode(&body) {
                    assert_eq!(Request::decode(&request.encode()), Some(request.clone()));
                    let reply = home.handle(session, objects[object], request);
                    assert_eq!(Reply::decode(&reply.encode()), Some(reply));
                }
            }
        }
        assert!(home.tickets() <= TICKETS_MAX * SESSIONS as usize && objects.len() <= SYNC_OBJECTS_MAX);
    }
    (0..SESSIONS).for_each(|session| home.session_ended(SessionId(session)));
    assert_eq!(home.tickets(), 0, "a process that is gone has something");
    assert!(!home.has_signals(), "for nobody");
}

/// Bodies that are only read.
fn bodies(body: &[u8]) {
    let _ = Reply::decode(body);
    if let Some(request) = copy::Request::decode(body) {
        let again = request.encode().expect("it was read");
        assert!(copy::Request::decode(&again).is_some());
    }
    if let Some(reply) = copy::Reply::decode(body) {
        assert!(copy::Reply::decode(&reply.encode()).is_some());
    }
    crate::lender::fuzz_status(body);
    crate::shm::fuzz(body);
}

/// A run file into which somebody else has written.
fn run_file(mut input: Input<'_>) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let memory = std::path::Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let path = folder.join(format!("netvm-fuzz-run-{}-{number}", std::process::id()));
    let params = RunParams {
        budget_bytes: 1 << 20,
        area_bytes: 1 << 30,
        small_local_bytes: 0,
        far_threshold_bytes: 0,
        lenders: vec!["unix:/nowhere".to_owned()],
        names: vec!["nowhere".to_owned()],
        replicas: 1,
        erasure: None,
        encrypt_pages: false,
        page_bytes: 4096,
        security: Security::default(),
        private_lender: 0,
        tier: netvm_core::tier::Policy::Auto,
        fault_path: crate::pager::FaultPath::Auto,
        verbose: false,
        learn: String::new(),
        command: String::new(),
    };
    let Ok(run) = RunFile::create(&path, &params) else { return };
    drop(run);
    let mut bytes = std::fs::read(&path).unwrap_or_default();
    for _ in 0..8 {
        let at = usize::from(u16::from_le_bytes(input.array())) * 8;
        let value = input.array::<8>();
        if let Some(word) = bytes.get_mut(at..at + 8).filter(|_| !input.is_empty()) {
            word.copy_from_slice(&value);
        }
    }
    if input.below(8) == 1 {
        bytes.truncate(input.below(256) * 64);
    }
    let written = std::fs::write(&path, &bytes);
    let opened = RunFile::open(&path);
    let _ = std::fs::remove_file(&path);
    let (Ok(()), Ok(run)) = (written, opened) else { return };
    let _ = (run.params(), run.summary(), run.message(), run.is_supervised());
    let Ok(slot) = run.join(std::process::id()) else { return };
    let granted = slot.grow(10);
    slot.set_starving(true);
    let _ = (slot.fair_share(), slot.others_starve(), slot.set_message("the end"));
    slot.set_starving(false);
    slot.release(granted);
    run.reap();
}
